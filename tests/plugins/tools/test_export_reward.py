"""An exported reward model scores in other libraries as here; recorded values are transformers' 5.24 on CPU."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from transformers import AutoTokenizer

from rlhf_core import artifacts, data, load_model
from rlhf_core.models import fresh_model
from rlhf_core.scoring import Scorer, ScoringContract
from rlhf_core.tokenizer import Encoder, TextOptions
from tests.shared import chat_cases as chat

CHATS = [
    [chat.user("a bab"), chat.assistant("ab a")],
    [chat.user("ba"), chat.assistant("b")],
    [{"role": "system", "content": "own"}, chat.user("ba"), chat.assistant("bb ab")],
    [chat.user("ba " * 30), chat.assistant("b")],
]
NO_STOP = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
VARIABLES = {"x": 'a"b', "y": False, "z": [1, None]}
END = TextOptions(read_at="template")
PLAIN = TextOptions("plain", read_at="template")


def chatml(template: Any = chat.CHATML, pad: str | None = "<|endoftext|>") -> Any:
    tokenizer = chat.byte_level(eos="<|im_end|>", pad=pad)
    tokenizer.chat_template = template
    return tokenizer


def no_stop() -> Any:
    tokenizer = chat.byte_level(bos="<s>", eos="</s>", pad="</s>")
    tokenizer.chat_template = NO_STOP
    return tokenizer


CASES: dict[str, tuple[Any, dict[str, Any], list[float]]] = {
    "at the template's end": (chatml(), {"chat_template": END}, [0.422584, 0.421026, 0.416635, 0.454568]),
    "at the stop token": (
        chatml(),
        {"chat_template": TextOptions()},
        [0.820831, 0.847312, 0.826614, 0.891638],
    ),
    "padded with the end token": (
        chatml(pad="<|im_end|>"),
        {"chat_template": dataclasses.replace(END, system_prompt='be "nice"\nö')},
        [0.402648, 0.408234, 0.416635, 0.444875],
    ),
    "with variables": (
        chatml("{{ x }}{{ y }}{{ z }}" + chat.CHATML),
        {"chat_template": dataclasses.replace(END, chat_template_kwargs=VARIABLES)},
        [0.408952, 0.415332, 0.406953, 0.44777],
    ),
    "with a date": (
        chatml("{{ strftime_now('%d %b %Y') }}" + chat.CHATML),
        {"chat_template": dataclasses.replace(END, template_date="2024-01-02")},
        [0.410934, 0.410247, 0.410789, 0.448291],
    ),
    "cut at the start": (
        chatml(),
        {"chat_template": END, "max_length": 40},
        [0.422584, 0.421026, 0.416635, 0.456454],
    ),
    "cut at the end": (
        chatml(),
        {"chat_template": END, "max_length": 40, "truncation_mode": "keep_start"},
        [0.422584, 0.421026, 0.416635, -1.121645],
    ),
    "in the plain template": (
        chat.byte_level(bos="<s>", adds_bos=True, eos="</s>", pad="</s>"),
        {"chat_template": PLAIN},
        [2.958325, 2.960735, 2.955215, 2.937504],
    ),
    "without a stop token in the template": (
        no_stop(),
        {"chat_template": TextOptions()},
        [2.959754, 2.964728, 2.963058, 2.935797],
    ),
    "with several templates": (
        chatml({"default": chat.CHATML, "tool_use": chat.CHATML}),
        {"chat_template": dataclasses.replace(END, system_prompt="abc")},
        [0.412001, 0.402856, 0.416635, 0.445566],
    ),
}


def save_fixed(tiny: ModuleType, tokenizer: Any, directory: Path, **options: Any) -> None:
    """Write an artifact with weights that any library can make again: sines."""
    sizes = {**tiny.SIZES, "max_position_embeddings": 512}
    model = fresh_model(sizes, "score", tokenizer=tokenizer, mesh=tiny.one_device())
    leaves, tree = jax.tree.flatten(model.params)
    sines = [np.sin(np.arange(x.size) * (0.7 + i)).reshape(x.shape) for i, x in enumerate(leaves)]
    sines = [0.4 * x if x.ndim > 1 else 1 + 0.1 * x for x in sines]
    placed = [
        jax.device_put(x.astype(np.float32), leaf.sharding) for x, leaf in zip(sines, leaves, strict=True)
    ]
    model = model.with_params(tree.unflatten(placed))
    model.save(directory)
    options = {"max_length": None, "mean": 0.5, "std": 1.0, **options}
    contract = ScoringContract.of(model.tokenizer, **options).to_dict()
    described = {"format": artifacts.FORMAT, "name": "model", "kind": "reward_model", "contract": contract}
    artifacts.write_manifest(directory, {**described, "files": artifacts.describe_files(directory)})


CHEAPEST = ("at the stop token",)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in CHEAPEST else [pytest.mark.long]) for case in CASES]
)
def test_transformers_plain_call_gives_the_artifacts_scores(
    case: str, rlhf: Any, tiny: ModuleType, tmp_path: Path
) -> None:
    tokenizer, options, recorded = CASES[case]
    save_fixed(tiny, tokenizer, tmp_path / "rm", **options)
    ended = rlhf("export", str(tmp_path / "rm"), str(tmp_path / "out"))
    assert ended.code == 0
    assert (
        "a reward model; README.md says how others score with it; left out: rlhf_artifact.json" in ended.out
    )
    rows = data.load([{"messages": messages} for messages in CHATS])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*are truncated as in its training")
        for path in ("rm", "out"):
            np.testing.assert_allclose(
                Scorer.load(tmp_path / path).score_rows(rows)["score"], recorded, atol=2e-6
            )
    # What transformers does: the last token that is not the config's pad_token_id, padded on either side.
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    exported = load_model(tmp_path / "out", head="score")
    for side in ("right", "left"):
        theirs.padding_side = side
        batch = theirs.apply_chat_template(
            CHATS, padding=True, truncation=True, return_tensors="np", return_dict=True
        )
        ids, mask = batch["input_ids"], batch["attention_mask"]
        places = np.arange(ids.shape[1])
        last = np.where(ids != exported.hf_config["pad_token_id"], places, -1).max(1)
        np.testing.assert_array_equal(last, np.where(mask == 1, places, -1).max(1))
        np.testing.assert_allclose(exported.scores(ids, mask), recorded, atol=2e-6)


@pytest.mark.parametrize("case", CASES)
def test_transformers_reads_the_tokens_that_were_trained_on(
    case: str, rlhf: Any, tiny: ModuleType, tmp_path: Path
) -> None:
    tokenizer, options, _ = CASES[case]
    save_fixed(tiny, tokenizer, tmp_path / "rm", **options)
    assert rlhf("export", str(tmp_path / "rm"), str(tmp_path / "out")).code == 0
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    contract = ScoringContract.of(tokenizer, **{"max_length": None, **options})
    length = contract.max_length or 1000
    kept = slice(-length, None) if contract.truncation_mode == "keep_end" else slice(length)
    wanted = Encoder(tokenizer, contract.text_options).whole([None] * len(CHATS), CHATS)
    for messages, ids in zip(CHATS, wanted, strict=True):
        found = theirs.apply_chat_template(messages, truncation=True, return_dict=False)
        assert found == ids[kept].tolist()
        assert found[-1] != theirs.pad_token_id


def test_the_card_says_what_no_file_can(rlhf: Any, tiny: ModuleType, tmp_path: Path) -> None:
    options = dataclasses.replace(END, system_prompt="be brief")
    save_fixed(tiny, chatml(), tmp_path / "rm", chat_template=options, max_length=40)
    assert rlhf("export", str(tmp_path / "rm"), str(tmp_path / "out")).code == 0
    card = (tmp_path / "out" / "README.md").read_text()
    for line in (
        "tokenizer.apply_chat_template(\n    [messages], padding=True, truncation=True",
        "tokenizer([\"…\" + '<|im_end|>']",
        "at most 40 tokens; truncation=True keeps their end",
        'without a system message with "be brief"',
        "mean 0.5 and standard deviation 1.",
    ):
        assert line in card
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (written["model_max_length"], written["truncation_side"]) == (40, "left")


def test_a_template_that_cannot_be_carried_along_is_a_warning(
    rlhf: Any, tiny: ModuleType, tmp_path: Path
) -> None:
    tokenizer = chatml("{% set form = '%d %b' %}{{ strftime_now(form) }}" + chat.CHATML)
    options = dataclasses.replace(END, template_date="2024-01-02")
    save_fixed(tiny, tokenizer, tmp_path / "rm", chat_template=options)
    ended = rlhf("export", str(tmp_path / "rm"), str(tmp_path / "out"))
    assert "tokenizes conversations differently from the reward model's training" in ended.warned
