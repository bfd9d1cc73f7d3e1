"""What `test_bad_input.py` does to a place: tables of mistakes, and what is to be said of each."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from tests.shared import places

ASK, REPLY, FILES = places.ASK, places.REPLY, places.FILES
Place: TypeAlias = Any


class Mistake(NamedTuple):
    name: str
    make: Callable[[Place], object]
    expected: tuple[str, ...]
    code: int = 2


def rewards(body: str) -> Callable[[Place], None]:
    return lambda place: place.write("rewards.py", f"def brevity(completions, size):\n    {body}\n")


def long(name: str) -> Callable[[Place], None]:
    row = {**FILES[name], "prompt": " ".join([ASK] * 9)}
    return lambda place: place.write(name, json.dumps(row) + "\n")


def tensors(place: Place) -> tuple[Path, dict[str, Any], bytes]:
    """(file, header, the tensors' bytes) of the model."""
    path = place.path / "model/model.safetensors"
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    return path, json.loads(content[8 : 8 + length]), content[8 + length :]


def rewrite(path: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def cut_short(place: Place) -> None:
    path = place.path / "model/model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def without_a_tensor(place: Place) -> None:
    path, header, data = tensors(place)
    start, end = header.pop("model.norm.weight")["data_offsets"]
    for entry in header.values():  # without a gap, which would be a mistake of its own
        if "data_offsets" in entry:
            entry["data_offsets"] = [at - (end - start) if at >= end else at for at in entry["data_offsets"]]
    rewrite(path, header, data[:start] + data[end:])


def with_another_shape(place: Place) -> None:
    path, header, data = tensors(place)
    header["model.layers.0.mlp.up_proj.weight"]["shape"] = [12, 32]
    rewrite(path, header, data)


def without_tokenizer(place: Place) -> None:
    for path in (place.path / "model").glob("tokenizer*"):
        path.unlink()


CHAT = [{"role": "user", "content": ASK}]
BASE = [
    Mistake("empty file", lambda p: p.write("corpus.jsonl", "\n"), ("corpus.jsonl is empty",)),
    Mistake(
        "missing column",
        lambda p: p.write("corpus.jsonl", '{"promt": "a", "completion": "b"}\n'),
        ("corpus.jsonl has no column 'prompt'", "it has promt, completion", "Did you mean 'promt'?"),
    ),
    Mistake(
        "null row",
        lambda p: p.row("corpus.jsonl", completion=None),
        ("corpus.jsonl row 2: 'completion' is null",),
    ),
    Mistake(
        "too long",
        long("corpus.jsonl"),
        ("the only text is over 32 tokens", "set max_sequence_length = ", 'or overlong = "truncate"'),
    ),
    Mistake("no model", lambda p: shutil.rmtree(p.path / "model"), ("stage 'base'.model: no such file",)),
    Mistake(
        "no config",
        lambda p: (p.path / "model/config.json").unlink(),
        ("model: no config.json: not a model directory",),
    ),
    Mistake("cut short", cut_short, ("model.safetensors: cannot be read: ", "fetch or save it again")),
    Mistake("missing tensor", without_a_tensor, ("model.norm.weight",)),
    Mistake("wrong shape", with_another_shape, ("model.layers.0.mlp.up_proj.weight", "[12, 32]", "[24, 16]")),
    Mistake(
        "no tokenizer",
        without_tokenizer,
        ("stage 'base'.model: ", "has no tokenizer files; put tokenizer.json and tokenizer_config.json"),
    ),
    Mistake(
        "no TOML",
        lambda p: p.write("base.toml", 'dir = "run\n'),
        ("base.toml line 1, column 11: not valid TOML: ",),
    ),
    Mistake(
        "mesh",
        lambda p: p.write("base.toml", b"mesh = { data = 3 }\n" + p.good["base.toml"]),
        ("mesh: data=3 × fsdp=1 × tensor=1 does not fit 8 device(s); set one of them to -1",),
    ),
]
RM = [
    Mistake("empty file", lambda p: p.write("pairs.jsonl", ""), ("pairs.jsonl is empty",)),
    Mistake(
        "missing column",
        lambda p: p.write("pairs.jsonl", '{"prompt": "a", "choosen": "b", "rejected": "c"}\n'),
        ("pairs.jsonl has no column 'chosen'", "Did you mean 'choosen'?", "Accepted: "),
    ),
    Mistake(
        "null row", lambda p: p.row("pairs.jsonl", chosen=None), ("pairs.jsonl row 2: 'chosen' is null",)
    ),
    Mistake(
        "row without the column",
        lambda p: p.rows("pairs.jsonl", {"prompt": ASK, "chosen": REPLY}),
        ("pairs.jsonl row 2: has no 'rejected'",),
    ),
    Mistake(
        "wrong type",
        lambda p: p.row("pairs.jsonl", rejected=3),
        ("pairs.jsonl row 2: 'rejected' is a number, not text",),
    ),
    Mistake(
        "margin",
        lambda p: p.row("pairs.jsonl", margin="much"),
        ("pairs.jsonl row 2: 'margin' is 'much', not a finite number",),
    ),
    Mistake(
        "too long",
        long("pairs.jsonl"),
        ("the only pair is over 32 tokens", "set max_sequence_length = ", 'or overlong = "truncate"'),
    ),
    Mistake(
        "no JSON",
        lambda p: p.write("pairs.jsonl", p.good["pairs.jsonl"] + b'{"prompt": "a", "chosen": \n'),
        ("pairs.jsonl row 5 is not JSON: ",),
    ),
    Mistake(
        "no UTF-8",
        lambda p: p.write("pairs.jsonl", p.good["pairs.jsonl"] + b'{"prompt": "caf\xe9"}\n'),
        ("pairs.jsonl row 5 is not UTF-8 (byte 0xe9 at column 16)",),
    ),
    Mistake(
        "missing file",
        lambda p: (p.path / "pairs.jsonl").rename(p.path / "pair.jsonl"),
        ("stage 'rm'.train_data: no such file: ", "pairs.jsonl. Did you mean 'pair.jsonl'?"),
    ),
    Mistake(
        "no template",
        lambda p: p.write(
            "pairs.jsonl",
            json.dumps(
                {side: [*CHAT, {"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
            ),
        ),
        ("pairs.jsonl has conversations", 'set chat_template = "plain"'),
    ),
]
POLICY = [
    Mistake("empty file", lambda p: p.write("prompts.jsonl", ""), ("prompts.jsonl is empty",)),
    Mistake(
        "missing column",
        lambda p: p.write("prompts.jsonl", '{"promt": "a", "size": 3}\n'),
        ("prompts.jsonl has no column 'prompt'", "Did you mean 'promt'?"),
    ),
    Mistake(
        "null row", lambda p: p.row("prompts.jsonl", prompt=None), ("prompts.jsonl row 2: 'prompt' is null",)
    ),
    Mistake(
        "too long", long("prompts.jsonl"), ("the only prompt is over 16 tokens", "set max_prompt_length = ")
    ),
    Mistake(
        "column a reward needs",
        lambda p: p.write("prompts.jsonl", json.dumps({"prompt": ASK, "sise": 3})),
        ("stage 'policy'.rewards: reward 'rewards.py:brevity' needs the column 'size'", "it has sise"),
    ),
    Mistake(
        "no such reward",
        lambda p: p.write("rewards.py", "def brevety(completions): ...\n"),
        ("stage 'policy'.rewards[0].name: ", "Did you mean 'brevety'?"),
    ),
    Mistake(
        "no Python",
        lambda p: p.write("rewards.py", "def brevity(completions:\n"),
        ("stage 'policy'.rewards[0].name: ", "rewards.py", "SyntaxError"),
    ),
    Mistake(
        "wrong length",
        rewards("return [1.0]"),
        ("reward 'rewards.py:brevity' returned 1 values for 3 completions", "made-up completions"),
    ),
    Mistake(
        "text",
        rewards("return ['good' for _ in completions]"),
        ("reward 'rewards.py:brevity' returned 'good' for completion 0; expected a number or None",),
    ),
    Mistake(
        "number",
        rewards("return 1.0"),
        ("reward 'rewards.py:brevity' returned float; it must return a list",),
    ),
    Mistake(
        "raises",
        rewards("return [1 / 0 for _ in completions]"),
        ("reward 'rewards.py:brevity' raised ZeroDivisionError: division by zero",),
        1,
    ),
    Mistake(
        "infinite",
        rewards("return [float('inf') for _ in completions]"),
        ("returned inf for completion 0",),
    ),
    Mistake(
        "all NaN",
        rewards("return [float('nan') for _ in completions]"),
        ("no reward function applies to any completion of the rollout",),
        1,
    ),
]

MISTAKES = {"base": BASE, "rm": RM, "policy": POLICY}
