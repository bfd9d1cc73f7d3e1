"""Tokenizers, heads and checkpoints that do not do, and devices that there are not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from rlhf_core.tokenizer import load_tokenizer
from tests.mistakes.mistake import Mistake, call, file, setting, typed
from tests.shared import places


def gone(name: str, *patterns: str) -> Mistake:
    """Files of the model that are not there."""

    def make(place: Any) -> None:
        for pattern in patterns:
            for path in place.path.glob(pattern):
                path.unlink()

    return Mistake(name, make)


def model_file(name: str, path: str, content: bytes | str) -> Mistake:
    return file(name, f"model/{path}", content)


def config(name: str, **changes: Any) -> Mistake:
    def make(place: Any) -> None:
        path = place.path / "model/config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return Mistake(name, make)


def tensors(
    name: str,
    change: Callable[[dict[str, Any]], object],
    model: str = "model",
    command: str = "check rm.toml",
) -> Mistake:
    """Tensors of a model that are others than its config.json has."""

    def make(place: Any) -> None:
        path = place.path / model / "model.safetensors"
        held = load_file(path)
        change(held)
        save_file(held, path)
        place.settings("rm.toml", f'model = "{model}"')

    return Mistake(name, make, command)


def two_outputs(held: dict[str, Any]) -> None:
    held["score.weight"] = np.zeros((2, 16), np.float32)


def another_shape(held: dict[str, Any]) -> None:
    held["model.layers.0.mlp.up_proj.weight"] = held["model.layers.0.mlp.up_proj.weight"].reshape(12, 32)


def cut_short(place: Any) -> None:
    path = place.path / "model/model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def without_a_model(place: Any) -> None:
    place.write("rm.toml", place.good["rm.toml"].replace(b'model = "model"\n', b""))


def three_devices(place: Any) -> None:
    place.write("base.toml", b"mesh = { data = 3 }\n" + place.good["base.toml"])


FRESH = ", ".join(f"{key} = {json.dumps(value)}" for key, value in places.MODEL.items())
DAMAGED: list[tuple[str, str, bytes]] = [
    ("generation_config.json", "text for an id", b'{"eos_token_id": "2"}'),
    ("generation_config.json", "a list in a list", b'{"eos_token_id": [[2]]}'),
    ("generation_config.json", "a list", b"[2]"),
    ("generation_config.json", "cut off", b"{"),
    ("generation_config.json", "an id below 0", b'{"eos_token_id": -1}'),
    ("tokenizer.json", "nested 100,000 deep", b"[" * 100_000),
    ("tokenizer_config.json", "nested 100,000 deep", b'{"a":' * 100_000),
    ("tokenizer_config.json", "a list", b"[]"),
    ("tokenizer_config.json", "half an emoji", b'{"chat_template": "\\ud800"}'),
    ("tokenizer_config.json", "a number for a template", b'{"chat_template": 5}'),
    ("chat_template.jinja", "not UTF-8", b"\xff"),
]
NOWHERE = ("pairs.jsonl", "./modle", "./a/b", "model/policy")
SECTIONS = {
    "Tokenizers": [
        gone("no tokenizer.json", "model/tokenizer.json"),
        gone("no files of a tokenizer", "model/tokenizer*"),
        model_file("tokenizer.json cut off", "tokenizer.json", "{"),
        model_file("tokenizer.json of another form", "tokenizer.json", "{}"),
        model_file("a configuration that is not text", "tokenizer_config.json", b"\xff"),
        setting(f"model = {{ {FRESH} }}", "a fresh model without one"),
        *(model_file(f"{file}: {how}", file, content) for file, how, content in DAMAGED),
        *(call(f"load_tokenizer({at!r})", lambda place, at=at: load_tokenizer(at)) for at in NOWHERE),
    ],
    "Reward heads": [
        tensors("two outputs", two_outputs, "scorer"),
        tensors("two outputs, and scores", two_outputs, "scorer", "score scorer pairs.jsonl"),
        typed("score model pairs.jsonl"),
        typed("score words pairs.jsonl"),
        typed("score pairs.jsonl pairs.jsonl"),
        typed("score scorr pairs.jsonl"),
        typed("score scorer pairs.jsonl --normalize"),
    ],
    "Checkpoints": [
        gone("no tensors", "model/model.safetensors"),
        model_file("a page in place of the tensors", "model.safetensors", "<html>not found</html>"),
        typed("check rm.toml", "tensors cut short", cut_short),
        gone("no config.json", "model/config.json"),
        model_file("config.json cut off", "config.json", "{"),
        config("a size in words", hidden_size="16"),
        model_file("an architecture that is not known", "config.json", '{"model_type": "gpt9"}'),
        tensors("a tensor less", lambda held: held.pop("model.norm.weight")),
        tensors("a tensor more", lambda held: held.update(odd=np.zeros(2, np.float32))),
        tensors("another length", lambda t: t.update({"model.norm.weight": np.zeros(8, np.float32)})),
        tensors("another shape", another_shape),
        tensors("another dtype", lambda t: t.update({"model.norm.weight": np.zeros(16, np.int8)})),
        setting('model = "pairs.jsonl"'),
        setting('model = "modle"'),
        setting('model = ""'),
        typed("check rm.toml", "no model", without_a_model),
        typed("check base.toml", "no directory", lambda place: shutil.rmtree(place.path / "model")),
        file("a manifest cut off", "scorer/rlhf_artifact.json", "x", "score scorer pairs.jsonl"),
    ],
    "Devices": [typed("run base.toml", "three of eight", three_devices)],
}
