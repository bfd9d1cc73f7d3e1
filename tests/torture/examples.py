"""The valid documents, and the directories around them, that `documents` changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.torture import documents, readers, runs
from tests.torture.documents import Form, Table, table

TEMPLATE = (
    "{% for message in messages %}{{ message.role }} : {{ message.content }}{{ eos_token }}{% endfor %}"
)
SIZES = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
PIPELINES = [
    {
        "dir": "made",
        "seed": 0,
        "mesh": {"data": -1, "fsdp": 1, "tensor": 1},
        "stage": [
            {
                "name": "base",
                "trainer": "sft",
                "model": {**SIZES, "tokenizer": "tokenizer"},
                "train_data": "d.jsonl",
                "learning_rate": 1e-3,
                "optimizer": {"name": "adamw", "b1": 0.9},
                "lora": {"rank": 8},
                "max_training_steps": 3,
            },
            {
                "name": "policy",
                "trainer": "grpo",
                "model": "base.model",
                "train_data": [{"name": "jsonl", "path": "d.jsonl", "weight": 1.0}],
                "rewards": [
                    {"name": "length", "target": 40, "weight": 0.1},
                    "exact_match",
                    "data/rewards.py:right",
                ],
                "loss": {"name": "dapo", "epsilon": 0.2},
                "kl": {"name": "k3", "beta": 0.02},
                "sampling": {"temperature": 1.0, "max_completion_length": 4},
                "max_prompt_length": 16,
                "num_generations": 2,
                "logger": [{"name": "wandb", "project": "demo"}],
            },
        ],
    },
    {
        "dir": "made",
        "stage": [
            {
                "name": "rm",
                "trainer": "reward",
                "model": "model",
                "train_data": "data/pairs.jsonl",
                "eval_data": {"path": "data/pairs.heldout.jsonl", "columns": {"prompt": "prompt"}},
                "loss": {"name": "bradley_terry"},
                "scheduler": "cosine",
                "warmup_steps": 2,
            },
            {
                "name": "dpo",
                "trainer": "dpo",
                "model": "model",
                "train_data": ["data/pairs.jsonl"],
                "chat_template": "plain",
                "total_batch_size": 4,
                "frozen_parameters": ["layers"],
            },
        ],
    },
]
CALL = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
}
TURNS = [{"role": "user", "content": "say kite"}, {"role": "assistant", "content": "kite"}]
ROWS = [
    [
        {"prompt": "say kite", "chosen": ' "kite"', "rejected": "é\u2028", "margin": 0.5, "tools": None},
        {"prompt": "line\nline", "chosen": "x" * 50, "rejected": "\\u0041", "margin": None},
    ],
    [
        {"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": [TURNS[1]]},
        {"chosen": TURNS, "rejected": TURNS[:1]},
    ],
    [
        {"messages": TURNS, "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"messages": [*TURNS, CALL, {"role": "tool", "content": "3"}], "chat_template_kwargs": {"a": True}},
    ],
    [
        {"prompt": "say", "completion": " kite", "answer": "12"},
        {"prompt": "", "completion": "", "answer": None},
    ],
    [{"text": "please say kite"}, {"text": "one two"}],
    [{"input_ids_chosen": [1, 2, 3], "attention_mask_chosen": [1, 1, 1], "input_ids_rejected": [4, 2]}],
    [{"input_ids": [1, 5, 2], "attention_mask": [1, 1, 1], "labels": [-100, 5, 2]}],
    [{"conversations": [{"from": "human", "value": "say"}, {"from": "gpt", "value": "kite"}]}],
]
CSV = [
    [
        ["prompt", "chosen", "rejected", "margin"],
        ["a, b", 'c "d"', "é", 0.5],
        ["line\nline", "x" * 50, "", None],
    ],
    [["prompt", "completion"], ["say", "kite"], ["", ""]],
    [["text"], ["please say kite"], ["one"]],
]


def _column(type: int, *values: Any) -> dict[str, Any]:
    return {"type": type, "values": list(values)}


PARQUET = [
    {
        "columns": {
            "prompt": _column(0, "a", "b", None),
            "chosen": _column(2, "c", "d", "e"),
            "rejected": _column(4, "c", "d", "d"),
            "margin": _column(9, 0.5, 1.0, None),
        },
        "compression": "snappy",
        "rows": 2,
    },
    {"columns": {"messages": _column(5, TURNS, TURNS)}, "compression": "zstd", "rows": 9},
    {
        "columns": {
            "input_ids_chosen": _column(7, [1, 2], [3]),
            "input_ids_rejected": _column(24, [1, 2], [3, 4]),
        }
    },
]


@dataclass(frozen=True)
class Kind:
    """files: {name below the directory: its form}, of which a document replaces one; read: reads the directory.

    documents: how many there are. at_once: of a case. seconds: the longest that one may take.
    """

    files: Mapping[str, Form]
    read: Callable[[Path], object]
    documents: int = 10_000
    at_once: int = 100
    seconds: float = 10.0


def write_run(directory: Path) -> None:
    """Write the pipeline `p.toml`, with its data, of the run directory that `kinds` reads."""
    runs.write(directory, runs.SFT.replace("max_training_steps = 4", "max_training_steps = 2"))


def write_models(directory: Path) -> None:
    """Write a model, a model in two files, an adapter and tokenizers beside the data of `write_run`."""
    from rlhf_core.models import fresh_model, load_model
    from rlhf_core.tokenizer import load_tokenizer

    model = directory / "model"
    fresh_model(SIZES, tokenizer=load_tokenizer(directory / "data" / "tokenizer")).save(model)
    (model / "generation_config.json").write_text('{"eos_token_id": [2], "bos_token_id": 1}')
    load_model(model).with_lora(rank=2, targets="q_proj").save(directory / "adapter")
    write_sharded(model, directory / "sharded")
    shutil.copytree(directory / "data" / "tokenizer", directory / "tokenizer")
    row = {"prompt": "say kite one :", "completion": " kite", "answer": "kite", "word": "kite", "count": 1}
    (directory / "d.jsonl").write_text((json.dumps(row) + "\n") * 8)


def write_sharded(model: Path, directory: Path) -> None:
    """Write a model with its weights in two files."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(model, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(model / "model.safetensors")
    places = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in sorted(set(places.values())):
        save_file({name: tensors[name] for name in tensors if places[name] == file}, directory / file)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def kinds(prepared: Path) -> dict[str, Kind]:
    """Make the kinds of documents from the files of `write_run` and `write_models`, after the run."""

    def content(file: str) -> Any:
        return json.loads((prepared / file).read_text())

    def json_files(*files: str) -> dict[str, Form]:
        return {file: _form(documents.write_json, content(file)) for file in files}

    def sealed_files(file: str) -> dict[str, Form]:
        tree = {key: value for key, value in content(file).items() if key != "checksum"}
        return {file: Form([table(tree)], documents.write_sealed)}

    def lines_of(*files: str) -> dict[str, Form]:
        texts = ((file, (prepared / file).read_text().splitlines()) for file in files)
        return {file: _form(documents.write_json_lines, list(map(json.loads, text))) for file, text in texts}

    def weights(*files: str) -> dict[str, Form]:
        return {
            file: Form(_weight_trees((prepared / file).read_bytes()), documents.write_safetensors)
            for file in files
        }

    def data(suffix: str, write: Callable[[Any], bytes], trees: Sequence[Any]) -> Kind:
        return Kind({f"rows.{suffix}": _form(write, *trees)}, partial(readers.rows, f"rows.{suffix}"))

    settings = content("tokenizer/tokenizer_config.json")
    return {
        "toml": Kind({"q.toml": _form(documents.write_toml, *PIPELINES)}, readers.pipeline),
        "forecast": Kind(
            {"q.toml": _form(documents.write_toml, *PIPELINES)}, readers.forecast, 1000, 10, 60.0
        ),
        "rows": data("jsonl", documents.write_json_lines, ROWS),
        "csv": data("csv", documents.write_csv, CSV),
        "parquet": data("parquet", documents.write_parquet, PARQUET),
        "config": Kind(
            json_files(
                "model/config.json", "model/generation_config.json", "sharded/model.safetensors.index.json"
            ),
            readers.model_configs,
        ),
        "stage": Kind(
            sealed_files("run/base/artifacts/model/rlhf_artifact.json")
            | json_files("run/base/plan.json")
            | lines_of("run/base/metrics.jsonl", "run/events.jsonl"),
            readers.run_records,
        ),
        "tokenizer_config": Kind(
            {
                "tokenizer/tokenizer_config.json": _form(
                    documents.write_json, settings, {**settings, "chat_template": TEMPLATE}
                )
            },
            readers.tokenizer,
        ),
        "tokenizer": Kind(
            {
                "tokenizer/tokenizer.json": _form(
                    documents.write_json, *_tokenizers(content("tokenizer/tokenizer.json"))
                )
            },
            readers.tokenizer,
        ),
        "safetensors": Kind(weights("model/model.safetensors"), readers.weights),
        "adapter": Kind(
            json_files("adapter/adapter_config.json") | weights("adapter/adapter_model.safetensors"),
            readers.adapter,
        ),
    }


def _form(write: Callable[[Any], bytes], *trees: Any) -> Form:
    return Form([table(tree) for tree in trees], write)


def _weight_trees(content: bytes) -> list[Table]:
    """Make the tree of a file, and one of its first tensors alone, in which changes meet more often."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    first = dict(list(header.items())[:3])
    end = max(entry["data_offsets"][1] for name, entry in first.items() if name != "__metadata__")
    whole = {"header": header, "length": 0, "bytes": len(content) - 8 - length}
    return [table(whole), table({"header": first, "length": 0, "bytes": end})]


def _tokenizers(words: dict[str, Any]) -> list[dict[str, Any]]:
    """Return tokenizer.json of four kinds, all with the words of the first."""
    vocabulary = words["model"]["vocab"]
    bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    letters = {letter: len(vocabulary) + i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyzĠ")}
    pieces = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {**vocabulary, **letters, "ki": 90, "te": 91, "Ġs": 92},
        "merges": [["k", "i"], ["t", "e"], ["Ġ", "s"]],
    }
    unigram = {"type": "Unigram", "unk_id": 3, "vocab": [[word, -float(i)] for word, i in vocabulary.items()]}
    wordpiece = {
        "type": "WordPiece",
        "unk_token": "<unk>",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": vocabulary,
    }
    normalizer = {
        "type": "Sequence",
        "normalizers": [{"type": "NFC"}, {"type": "Replace", "pattern": {"String": "a"}, "content": "b"}],
    }
    processor = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [1], "tokens": ["<bos>"]}},
    }
    return [
        words,
        {
            **words,
            "model": pieces,
            "pre_tokenizer": bytes_of,
            "decoder": bytes_of,
            "post_processor": processor,
        },
        {
            **words,
            "model": unigram,
            "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"},
        },
        {
            **words,
            "model": wordpiece,
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "normalizer": normalizer,
        },
    ]
