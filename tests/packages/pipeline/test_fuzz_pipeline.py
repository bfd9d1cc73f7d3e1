"""Mutated pipeline files: the result is InputError or a plan, never a traceback."""

from __future__ import annotations

import random
import re
import warnings
from pathlib import Path

import pytest

from rlhf_core.errors import InputError
from tests.shared import pipelines

PIPELINE = """dir = "run"
seed = 0
mesh = { data = -1, fsdp = 1, tensor = 1 }
[[stage]]
name = "base"
trainer = "sft"
model = { model_type = "llama", hidden_size = 64, num_hidden_layers = 2, num_attention_heads = 4 }
train_data = "d.jsonl"
learning_rate = 1e-3
optimizer = { name = "adamw", b1 = 0.9 }
lora = { rank = 8 }
[[stage]]
name = "policy"
trainer = "grpo"
model = "base.model"
train_data = [{ name = "jsonl", path = "d.jsonl", weight = 1.0 }]
rewards = [{ name = "length", target = 40, weight = 0.1 }, "exact_match"]
loss = { name = "dapo", epsilon = 0.2 }
kl = { name = "k3", beta = 0.02 }
sampling = { temperature = 1.0, max_completion_length = 64 }
logger = [{ name = "wandb", project = "demo" }]
"""
ODD = [
    *("1" * 5000, "9" * 400, "-1", "0", "1e999", "nan", "true", "1979-05-27", "[]", "{}", "[[[]]]"),
    *('""', '"\\u0000"', '"\\u0000.py:g"', f'"{"x" * 5000}"', f'"/{"y/" * 3000}"', '"~nobody/x"', '"f.py:g"'),
    *("[" * 2000 + "]" * 2000, "{ name = 1 }", "{ name = '' }", '{ env = "X" }', '[1, "a"]'),
    *('"base."', '".model"', '"base.model.x"', '"/proc/self/mem"', '"a\\nb"', '"none"', '"/dev/null"'),
]
KEYS = ["seed", "mesh.data", "dir", "policy.loss.name", "policy.model", "base.model.hidden_size", "base.lora"]
VALUE = re.compile(r'= ("[^"]*"|[-\d.e]+)')


def mutated(rng: random.Random) -> tuple[bytes, tuple[str, ...]]:
    """Replace a value, a nested value or bytes of a pipeline file; or make a `--set`."""
    lines, kind = PIPELINE.split("\n"), rng.randrange(4)
    if kind == 0:
        content = bytearray(PIPELINE.encode())
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        return bytes(content), ()
    if kind == 1:
        return PIPELINE.encode(), (f"{rng.choice(KEYS)}={rng.choice(ODD)}",)
    line = rng.choice([number for number, text in enumerate(lines) if "=" in text])
    found = rng.choice([*VALUE.finditer(lines[line])] or [None])
    if kind == 2 and found is not None:
        lines[line] = f"{lines[line][: found.start()]}= {rng.choice(ODD)}{lines[line][found.end() :]}"
    else:
        lines[line] = f"{lines[line].split('=')[0]}= {rng.choice(ODD)}"
    return "\n".join(lines).encode(), ()


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 12))]
)
def test_mutated_pipelines(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.jsonl").write_text('{"prompt": "a"}\n')
    rng = random.Random(seed)
    refused = 0
    for _ in range(100):
        content, sets = mutated(rng)
        (tmp_path / "p.toml").write_bytes(content)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                pipelines.planned("p.toml", *sets, dir=None)
            except InputError:
                refused += 1
    assert refused > 40  # the mutations have an effect
