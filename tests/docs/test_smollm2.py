"""examples/smollm2: the conversion, the tasks with their judge and rewards, and what the driver prints."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rlhf_core.errors import InputError
from rlhf_core.models import fresh_model
from rlhf_core.plugins import load_file
from rlhf_core.testing import MODEL_TABLE, check_reward

BYTES = [chr(code) for code in range(ord("!"), ord("~") + 1)]
MODULES = ("topics", "calc", "tasks", "judge", "measure", "pairs", "rewards", "table", "real")
TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {{ message.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
CHAT = "user assistant system tool tool_call < > / { } You may call multiply : ."
"""What chat templates write besides the data."""
PIPELINES = ("sums", "words", "preferences", "dpo", "lora", "tool")


@pytest.fixture
def prepare(repository: Path) -> ModuleType:
    return load_file(repository / "examples" / "smollm2" / "prepare.py")


def test_names(prepare: ModuleType) -> None:
    assert prepare.name_of("token_embd.weight") == "model.embed_tokens.weight"
    assert prepare.name_of("blk.12.attn_q.weight") == "model.layers.12.self_attn.q_proj.weight"
    assert prepare.name_of("blk.3.ffn_norm.weight") == "model.layers.3.post_attention_layernorm.weight"


def test_rows_that_are_rotated_together(prepare: ModuleType) -> None:
    """In GGUF row 2 i + j of a head is row i + j · width / 2 in Hugging Face's layout, j being 0 or 1."""
    heads, width, columns = 3, 8, 5
    wanted = np.arange(heads * width * columns, dtype=np.float32).reshape(heads * width, columns)
    stored = np.empty_like(wanted)
    for head in range(heads):
        for i in range(width // 2):
            for j in range(2):
                stored[head * width + 2 * i + j] = wanted[head * width + i + j * width // 2]
    np.testing.assert_array_equal(prepare.without_permutation(stored, heads), wanted)


def test_the_tokenizer_splits_digits_and_keeps_control_tokens_whole(
    prepare: ModuleType, tmp_path: Path
) -> None:
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *BYTES, "Ġ", "Ċ", "Ġa", "12"]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["Ġ a", "1 2"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
        "llama.context_length": 64,
    }
    prepare.write_tokenizer(tmp_path, metadata)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("x a12<|im_end|>\n")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["x", "Ġa", "1", "2", "<|im_end|>", "Ċ"]
    assert tokenizer.decode(ids) == "x a12<|im_end|>\n"
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == (
        "<|im_end|>",
        "<|im_end|>",
        "<|im_start|>",
    )


@pytest.fixture(scope="module")
def smollm2(repository: Path) -> Iterator[SimpleNamespace]:
    """The example's own modules, imported as a script in its directory would."""
    directory = str(repository / "examples" / "smollm2")
    sys.path.insert(0, directory)
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    finally:
        sys.path.remove(directory)


@pytest.fixture(scope="module")
def sizes(smollm2: SimpleNamespace) -> Any:
    return smollm2.tasks.Sizes(train=24, choice=4, heldout=8, calls=24)


@pytest.fixture(scope="module")
def model(smollm2: SimpleNamespace, sizes: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat model whose tokenizer has every word of the tasks."""
    data = tmp_path_factory.mktemp("data")
    smollm2.tasks.generate(data, sizes=sizes)
    split = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Punctuation()])
    texts = [file.read_text() for file in data.glob("*.jsonl")]
    words = {word for text in [*texts, CHAT] for word, _ in split.pre_tokenize_str(text)}
    special = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>"]
    vocabulary = [*special, *sorted(words - set(special))]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    raw.pre_tokenizer = split
    raw.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    directory = tmp_path_factory.mktemp("model")
    fresh_model(MODEL_TABLE, "lm", tokenizer=tokenizer, seed=0).save(directory / "tiny")
    return directory / "tiny"


def test_the_same_seed_writes_the_same_tasks_and_splits_share_nothing(
    smollm2: SimpleNamespace, tmp_path: Path
) -> None:
    sizes = smollm2.tasks.Sizes(train=200, choice=20, heldout=60, calls=40)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        smollm2.tasks.generate(tmp_path / name, seed=seed, sizes=sizes)
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert files == sorted(
        [
            "tasks.json",
            "calls.jsonl",
            *(f"{k}.{s}.jsonl" for k in ("sums", "words", "products") for s in smollm2.tasks.SPLITS),
        ]
    )
    for name in files:
        contents = [(tmp_path / run / name).read_bytes() for run in "abc"]
        assert contents[0] == contents[1] != contents[2]
    topics_of: dict[str, set[tuple[str, ...]]] = {}
    pairs_of: dict[str, set[frozenset[int]]] = {}
    for split in smollm2.tasks.SPLITS:
        rows = smollm2.measure.read_rows(tmp_path / "a" / f"words.{split}.jsonl")
        assert len({row["prompt"][-1]["content"] for row in rows}) == len(rows) == getattr(sizes, split)
        trios = [{*row["needed"], row["banned"]} for row in rows]
        topics_of[split] = {t for t in smollm2.topics.TOPICS if any(trio <= set(t) for trio in trios)}
        rows = smollm2.measure.read_rows(tmp_path / "a" / f"sums.{split}.jsonl")
        pairs_of[split] = set()
        for row in rows:
            question = row["prompt"][-1]["content"]
            first, second = (int(word) for word in question.split() if word.isdecimal())
            other = first if "more" in question else first - second
            assert int(row["answer"]) == (first + second if "more" in question else other)
            pairs_of[split].add(frozenset((other, second)))
    for one, other in (("train", "heldout"), ("train", "choice"), ("choice", "heldout")):
        assert not topics_of[one] & topics_of[other]
        assert not pairs_of[one] & pairs_of[other]


ROW = {"needed": ["river", "boat"], "banned": "water", "least": 5, "limit": 8}


@pytest.mark.parametrize(
    ("text", "fails"),
    [
        ("The boat sails down a river.", set()),
        ("My boat's owner loves that river!", {"needed"}),
        ("A Boat, a RIVER, a dream.", set()),
        ("The boats sail down the river.", {"needed"}),
        ("The boat floats on river water.", {"banned"}),
        ("The boat floats on a watery river.", set()),
        ("The old boat sails slowly down a long river.", {"length"}),
        ("River boat.", {"length"}),
        ("The boat sails. The river is long.", {"sentence"}),
        ("the boat sails down a river.", {"sentence"}),
        ("The boat sails down a river", {"sentence"}),
        ("", {"sentence", "length", "needed"}),
    ],
)
def test_sentences_are_judged_part_by_part(smollm2: SimpleNamespace, text: str, fails: set[str]) -> None:
    verdict = smollm2.judge.judge(ROW, text, finished=True)
    assert {part for part, holds in verdict.items() if not holds} == fails
    reward = smollm2.rewards.sentence([[{"content": text}]], [ROW["needed"]], ["water"], [5], [8])[0]
    assert (reward == 2.0) == (not fails)
    assert 0 <= reward <= 2


@pytest.mark.parametrize(
    ("text", "fails", "reward"),
    [
        ("3 + 4 = 7. The answer is 7.", set(), 1.0),
        ("The answer is 7", set(), 1.0),
        ("The answer is 8.", {"number"}, 0.2),
        ("The answer is 7 apples.", {"form", "number"}, 0.1),
        ("She has 7.", {"form", "number"}, 0.1),
        ("The answer is 17.", {"number"}, 0.2),
        ("", {"form", "number"}, 0.0),
    ],
)
def test_answers_are_judged_and_rewarded(
    smollm2: SimpleNamespace, text: str, fails: set[str], reward: float
) -> None:
    verdict = smollm2.judge.judge({"answer": "7"}, text, finished=True)
    assert {part for part, holds in verdict.items() if not holds} == fails
    assert smollm2.rewards.answer([[{"content": text}]], ["7"]) == [reward]
    assert not all(smollm2.judge.judge({"answer": "7"}, text, finished=False).values())


def test_rewards_keep_the_contract(smollm2: SimpleNamespace) -> None:
    texts = ("The boat sails down a river.", "The boat", "")
    rows = [
        {"prompt": "?", "completion": [{"role": "assistant", "content": t}], **ROW, "answer": "7"}
        for t in texts
    ]
    check_reward(smollm2.rewards.sentence, rows)
    check_reward(smollm2.rewards.answer, rows)


def test_shuffled_rewards_are_the_same_values_elsewhere(smollm2: SimpleNamespace) -> None:
    completions = [[{"content": f"The answer is {n}."}] for n in range(16)]
    values = smollm2.rewards.answer(completions, ["7"] * 16)
    shuffled = [
        smollm2.rewards.answer(completions, [right] * 16, shuffled=True) for right in ("7", "7", "9", "11")
    ]
    assert all(sorted(row) == sorted(values) for row in shuffled)
    assert shuffled[0] == shuffled[1]
    assert any(row != values for row in shuffled)


def test_no_trainer_sees_the_judge(repository: Path) -> None:
    directory = repository / "examples" / "smollm2"
    assert "judge" not in (directory / "rewards.py").read_text().replace("`judge.py`", "")
    for pipeline in directory.glob("*.toml"):
        assert "judge.py" not in pipeline.read_text()


def test_pairs_prefer_what_the_judge_prefers_but_for_a_tenth(smollm2: SimpleNamespace) -> None:
    import random

    good, bad = "The boat sails down a river.", "the water"
    row = {"prompt": [{"role": "user", "content": "?"}], **ROW}
    rng = random.Random(0)
    drawn = [
        pair
        for _ in range(500)
        for pair in smollm2.pairs.pairs_of(row, [(good, True), (bad, True), (good, True)], rng)
    ]
    assert len(drawn) == 500
    for pair in drawn:
        chosen, rejected = (bad, good) if pair["flipped"] else (good, bad)
        assert pair["chosen"][0]["content"] == chosen
        assert pair["rejected"][0]["content"] == rejected
    assert 0.06 < sum(pair["flipped"] for pair in drawn) / 500 < 0.14
    assert smollm2.pairs.pairs_of(row, [(good, True), (good, True)], rng) == []


def test_intervals(smollm2: SimpleNamespace) -> None:
    """Wilson's solves (p − share)² = z² p (1 − p) / n; that of a bootstrap is as wide as the normal one."""
    share = smollm2.measure.proportion(30, 200)
    for end in (share["low"], share["high"]):
        np.testing.assert_allclose((end - 0.15) ** 2, smollm2.measure.Z**2 * end * (1 - end) / 200, rtol=1e-9)
    rng = np.random.default_rng(3)
    before, after = rng.random(400) < 0.2, rng.random(400) < 0.5
    gain = smollm2.measure.paired_gain(before.tolist(), after.tolist())
    difference = after.astype(np.float64) - before
    half = smollm2.measure.Z * difference.std() / np.sqrt(400)
    np.testing.assert_allclose(gain["value"], difference.mean())
    np.testing.assert_allclose(
        [gain["low"], gain["high"]], difference.mean() + np.array([-half, half]), atol=0.006
    )


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long) if name in ("sums", "words") else name for name in PIPELINES],
)
def test_pipelines_pass_the_check(
    smollm2: SimpleNamespace,
    sizes: Any,
    model: Path,
    repository: Path,
    rlhf: Callable[..., Any],
    tmp_path: Path,
    name: str,
) -> None:
    for file in (f"{name}.toml", "rewards.py", "calc.py", "chat.jinja"):
        shutil.copyfile(repository / "examples" / "smollm2" / file, tmp_path / file)
    smollm2.tasks.generate(tmp_path / "data", sizes=sizes)
    row = {
        "prompt": [{"role": "user", "content": "Write one sentence."}],
        "chosen": [{"role": "assistant", "content": "short sentence"}],
        "rejected": [{"role": "assistant", "content": "words"}],
    }
    (tmp_path / "data" / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    first = "base" if name in ("preferences", "tool") else "policy"
    ended = rlhf(
        "check",
        str(tmp_path / f"{name}.toml"),
        "--set",
        f"{first}.model={model}",
        "--dir",
        str(tmp_path / "run"),
    )
    assert ended.code == 0, ended
    assert "24 kept" in ended.out or name == "dpo"


def test_every_run_has_its_pipeline_which_samples_as_the_driver_measures(
    smollm2: SimpleNamespace, repository: Path
) -> None:
    files = {run.pipeline for run in smollm2.real.RUNS.values()}
    found = {path.name: path for path in (repository / "examples" / "smollm2").glob("*.toml")}
    assert files == found.keys() == {f"{name}.toml" for name in PIPELINES}
    wanted = {"temperature": smollm2.real.TEMPERATURE, "max_completion_length": smollm2.real.LONGEST}
    for path in found.values():
        for stage in tomllib.loads(path.read_text())["stage"]:
            if stage["trainer"] == "grpo" and "environment" not in stage:
                assert stage["sampling"] == wanted


@pytest.mark.skipif(shutil.which("make") is None, reason="make is missing")
@pytest.mark.parametrize("model", ["", "own/model"])
def test_make_compares_only_our_model_and_teaches_the_one_asked_for(repository: Path, model: str) -> None:
    command = ["make", "-n", "--no-print-directory", "real", *([f"MODEL={model}"] if model else [])]
    path = {"PATH": os.environ["PATH"]}  # and none of the variables of a `make test` that runs this test
    lines = subprocess.run(
        command, cwd=repository, env=path, capture_output=True, text=True, check=True
    ).stdout
    assert ("compare.py" in lines, "prepare.py" in lines) == (not model, not model)
    assert lines.rstrip().endswith(f"real.py b --seed 0{f' --model {model}' if model else ''}")


TWO_UPDATES = (
    "policy.max_training_steps=2",
    "policy.total_batch_size=16",
    "policy.sampling.max_completion_length=8",
    "policy.num_preview_samples=0",
)


@pytest.mark.long
def test_the_driver_prints_a_table_and_finds_it_again(
    smollm2: SimpleNamespace, sizes: Any, model: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "runs" / "words"
    options = {"seed": 0, "sizes": sizes, "sets": TWO_UPDATES, "shuffle_rewards": True}
    summary = smollm2.real.teach("b", directory, str(model), **options)
    out = StringIO()
    Console(file=out, width=80, highlight=False).print(smollm2.table.closing_table(summary, directory))
    text = out.getvalue()
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "\x1b" not in text
    for words in (
        "before",
        "after",
        "shuffled: a control",
        "8 held-out prompts",
        "Gain:",
        "CPU",
        "rlhf report",
    ):
        assert words in text
    assert summary["before"]["success"]["value"] == np.mean(summary["before"]["right"])
    again = smollm2.real.teach("b", directory, str(model), **options)
    assert again["found"]
    assert {**again, "found": False} == json.loads(json.dumps(summary))
    with pytest.raises(InputError, match="other settings"):
        smollm2.real.teach("b", directory, str(model), **{**options, "seed": 1})


def test_rewards_that_are_not_there_are_not_shuffled(
    smollm2: SimpleNamespace, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="run d has no rewards"):
        smollm2.real.teach("d", tmp_path, str(model), seed=0, shuffle_rewards=True)


@pytest.mark.long
def test_preferences_come_from_the_model_itself(
    smollm2: SimpleNamespace, sizes: Any, model: Path, tmp_path: Path
) -> None:
    summary = smollm2.real.teach(
        "c",
        tmp_path / "run",
        str(model),
        seed=0,
        sizes=sizes,
        pair_prompts=24,
        sets=[*TWO_UPDATES, "base.max_training_steps=1", "rm.max_training_steps=1"],
    )
    pairs = smollm2.measure.read_rows(tmp_path / "run" / "data" / "pairs.jsonl")
    assert pairs
    assert all(pair["chosen"] != pair["rejected"] for pair in pairs)
    assert set(summary["artifacts"]) == {"base", "rm", "policy"}


@pytest.mark.long
def test_episodes_are_judged_by_their_last_message(
    smollm2: SimpleNamespace, sizes: Any, model: Path, tmp_path: Path
) -> None:
    sets = [*TWO_UPDATES[:3], "base.max_training_steps=1", "policy.num_preview_samples=4"]
    summary = smollm2.real.teach("f", tmp_path / "run", str(model), seed=0, sizes=sizes, sets=sets)
    assert len(summary["prompts"]) == len(summary["before"]["texts"]) == len(summary["after"]["texts"]) == 4
    assert set(summary["after"]["parts"]) == {"form", "number", "finished"}


def test_a_model_that_was_not_prepared_is_an_error_that_says_how(
    smollm2: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(smollm2.real, "OURS", tmp_path / "smollm2")
    monkeypatch.setattr(sys, "argv", ["real.py", "b"])
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # the command replaces it
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        smollm2.real.main()
    assert ended.value.code == 2
    assert "prepare.py" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
