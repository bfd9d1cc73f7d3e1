"""Tokenizers, heads and checkpoints that do not do, through `rlhf check` and `rlhf score`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file as load_tensors
from safetensors.numpy import save_file as save_tensors

from tests.shared import cases

Case, MODEL, setting = cases.Case, cases.MODEL, cases.setting
TWO_OUTPUTS = {"score.weight": np.zeros((2, 16), np.float32)}


def score(*arguments: str, expected: tuple[str, ...], make: Callable[[Any], object] = lambda p: None) -> Any:
    return Case(make, expected, ("score", *arguments))


def file(name: str, content: bytes | str | None, *expected: str, model: str = "model") -> Any:
    """A file of the model that holds something else, or is gone."""

    def make(place: Any) -> None:
        place.settings("rm.toml", f'model = "{model}"')
        path = place.path / model / name
        path.unlink() if content is None else place.write(f"{model}/{name}", content)

    return Case(make, (MODEL, *expected))


def config(*expected: str, **changes: Any) -> Any:
    def make(place: Any) -> None:
        path = place.path / "model/config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return Case(make, (MODEL, *expected))


def tensors(
    change: Callable[[dict[str, Any]], object], *expected: str, model: str = "model", score: bool = False
) -> Any:
    def make(place: Any) -> None:
        path = place.path / model / "model.safetensors"
        held = load_tensors(path)
        change(held)
        save_tensors(held, path)
        place.settings("rm.toml", f'model = "{model}"')

    command = ("score", model, "pairs.jsonl") if score else ("check", "rm.toml")
    return Case(make, (*(() if score else (MODEL,)), *expected), command)


def a_file(name: str) -> Callable[[Any], object]:
    def make(place: Any) -> None:
        (place.path / name).parent.mkdir(exist_ok=True)
        place.write(name, "x")

    return make


CASES = {
    "tokenizer": [
        file("tokenizer.json", None, "cannot be read: it has no tokenizer.json; put it there"),
        file("tokenizer.json", "{", "tokenizer.json is not JSON (", "fetch it again"),
        file("tokenizer.json", "{}", "the tokenizer in ", "cannot be read: "),
        file("tokenizer_config.json", b"\xff", "tokenizer_config.json is not JSON (", "fetch it again"),
        setting(
            f"model = {{ {', '.join(f'{k} = {json.dumps(v)}' for k, v in cases.places.MODEL.items())} }}",
            ".model.tokenizer: missing; a fresh model needs",
        ),
    ],
    "head": [
        tensors(
            lambda t: t.update(TWO_OUTPUTS),
            "its head gives 2 numbers (num_labels",
            "start from",
            model="scorer",
        ),
        tensors(
            lambda t: t.update(TWO_OUTPUTS),
            "its head gives 2 numbers (num_labels",
            model="scorer",
            score=True,
        ),
        score(
            "model",
            "pairs.jsonl",
            expected=("model is a language model, without a reward head: rlhf train reward",),
        ),
        score("words", "pairs.jsonl", expected=("words: no config.json: not a model directory",)),
        score("pairs.jsonl", "pairs.jsonl", expected=("pairs.jsonl is a file; give the directory",)),
        score("scorr", "pairs.jsonl", expected=("scorr: no such directory; give ", "Did you mean 'scorer'?")),
        score(
            "scorer",
            "pairs.jsonl",
            "--normalize",
            expected=("scorer: cannot normalize: ", "or leave normalize out"),
        ),
    ],
    "checkpoint": [
        file("model.safetensors", None, "no model.safetensors and no model.safetensors.index.json"),
        file(
            "model.safetensors",
            "<html>not found</html>",
            "model.safetensors: cannot be read: ",
            "fetch or save it again",
        ),
        file("config.json", None, "no config.json: not a model directory in Hugging Face layout"),
        file("config.json", "{", "config.json is not JSON (", "fetch it again"),
        config("config.json: Field 'hidden_size' expected int, got str", hidden_size="16"),
        config("model_type 'gpt9' is not supported; known: ", model_type="gpt9"),
        tensors(lambda t: t.pop("model.norm.weight"), "'model.norm.weight' is missing from its safetensors"),
        tensors(
            lambda t: t.update(odd=np.zeros(2, np.float32)),
            "'odd' is unexpected: a llama of this config.json has none",
        ),
        tensors(
            lambda t: t.update({"model.norm.weight": np.zeros(8, np.float32)}),
            "has shape [8]; config.json makes it [16]",
        ),
        tensors(
            lambda t: t.update({"model.norm.weight": np.zeros(16, np.int8)}),
            "has dtype I8; only F32, F16, BF16",
        ),
        setting('model = "pairs.jsonl"', ".model: ", "pairs.jsonl is a file; give the directory that holds"),
        setting('model = "modle"', ".model: no such file: ", "Did you mean 'model'?"),
        setting('model = ""', ".model: is empty; give a path or a name"),
        Case(
            lambda p: p.write("rm.toml", p.good["rm.toml"].replace(b'model = "model"\n', b"")),
            (MODEL, "missing; give a directory"),
        ),
        score(
            "scorer",
            "pairs.jsonl",
            make=a_file("scorer/rlhf_artifact.json"),
            expected=("rlhf_artifact.json is damaged", "run the stage"),
        ),
    ],
}


@pytest.mark.parametrize("category", CASES)
def test_one_message_with_place_and_remedy(category: str, place: Any, rlhf: Callable[..., Any]) -> None:
    wrong = cases.wrong_among(CASES[category], place, rlhf)
    assert not wrong, "\n".join(wrong)


def test_rows_longer_than_the_model_was_made_for_are_said(place: Any, rlhf: Callable[..., Any]) -> None:
    row = cases.places.FILES["pairs.jsonl"]
    place.rows("pairs.jsonl", {**row, "prompt": " ".join([row["prompt"]] * 12)})
    place.settings("rm.toml", "max_sequence_length = 200")
    ended = rlhf("check", "rm.toml")
    assert ended[:3] == (0, "", "")
    said = " ".join(ended.out.replace("│", " ").split())
    assert "1 of up to 86 tokens, more than the model's 64 positions: set max_sequence_length" in said


def test_prompts_that_fill_the_models_context_are_refused(place: Any, rlhf: Callable[..., Any]) -> None:
    long = " ".join([cases.places.ASK] * 12)
    place.settings("policy.toml", "max_prompt_length = 100\nsampling = { max_completion_length = 60 }")
    place.write("prompts.jsonl", json.dumps({"prompt": long, "size": 3}) + "\n")
    ended = rlhf("check", "policy.toml")
    assert (ended.code, ended.out) == (2, "")
    assert re.search(
        r"train_data: the shortest prompt has \d+ tokens, and the model's context is 64", ended.message
    )
    place.rows("prompts.jsonl")
    ended = rlhf("check", "policy.toml")
    assert ended.code == 0
    first = ended.out.partition("warning: ")[2]
    assert first.startswith("sampling.max_completion_length=60: with prompts of up to")


def test_a_plan_has_labels_and_what_has_no_effect(place: Any, rlhf: Callable[..., Any]) -> None:
    rewards = 'rewards = [{ name = "rewards.py:brevity", label = "short" }]'
    place.settings("policy.toml", f"{rewards}\ndataloader_num_workers = 2")
    ended = rlhf("check", "policy.toml")
    assert ended.code == 0
    said = " ".join(ended.out.split())
    assert "rewards short" in said
    assert "dataloader_num_workers=2: has no effect: these data are tokenised before the first update" in said
