"""Runs so small that hundreds of them are possible: their files, and what two of them must have in common."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.recipes import data as sentences

MODEL = (
    '{ model_type = "llama", hidden_size = 16, num_hidden_layers = 1, num_attention_heads = 2, '
    'intermediate_size = 24, max_position_embeddings = 32, initializer_range = 0.1, tokenizer = "data/tokenizer" }'
)
SFT = f"""
[[stage]]
name = "base"
trainer = "sft"
model = {MODEL}
train_data = "data/corpus.jsonl"
total_batch_size = 4
learning_rate = 1e-2
max_training_steps = 4
save_steps = 2
save_total_limit = 2
log_steps = 1
max_sequence_length = 32
"""
REWARD = """
[[stage]]
name = "rm"
trainer = "reward"
model = "base.model"
train_data = "data/pairs.jsonl"
eval_data = "data/pairs.heldout.jsonl"
eval_on_start = true
evaluation_steps = 2
total_batch_size = 4
learning_rate = 1e-2
max_training_steps = 4
save_steps = 2
log_steps = 1
max_sequence_length = 32
"""
GRPO = """
[[stage]]
name = "policy"
trainer = "grpo"
model = "base.model"
train_data = "data/prompts.jsonl"
eval_data = "data/prompts.heldout.jsonl"
evaluation_steps = 4
rewards = ["data/rewards.py:right"]
num_generations = 2
total_batch_size = 4
num_iterations = 2
steps_per_generation = 2
learning_rate = 1e-2
max_training_steps = 8
save_steps = 3
log_steps = 1
max_prompt_length = 16
sampling = { max_completion_length = 4 }
kl = { name = "k3", beta = 0.02 }
num_preview_samples = 2
"""


def write(directory: Path, *stages: str, dir: str = "run", seed: int = 0) -> Path:
    """Write a pipeline of stages with its data below a directory; return the path of `p.toml`."""
    write_data(directory / "data", seed=0)
    path = directory / "p.toml"
    path.write_text(f'dir = "{dir}"\nseed = {seed}\n' + "".join(stages))
    return path


def write_data(directory: Path, *, rows: int = 24, seed: int = 0) -> None:
    """Write the recipes' data, cut to `rows` rows a file, with their reward function."""
    directory.mkdir(parents=True, exist_ok=True)
    sentences.write_tokenizer(directory / "tokenizer")
    draw = sentences.Draw(seed, "torture")
    prompts = [draw.prompt() for _ in range(rows)]
    files: Mapping[str, Iterable[Mapping[str, Any]]] = {
        "corpus": [draw.demonstration(careless=False) for _ in range(rows)],
        "pairs": [draw.pair(words_only=False) for _ in range(rows)],
        "pairs.heldout": [draw.pair(words_only=True) for _ in range(6)],
        "prompts": prompts,
        "prompts.heldout": [draw.prompt() for _ in range(6)],
    }
    for name, lines in files.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "rewards.py").write_text(Path(sentences.__file__).with_name("rewards.py").read_text())


CLOCKS = ("time", "seconds", "tokens_per_second", "_per_second", "memory", "started", "finished")
"""Parts of names of what differs between two runs that are equal."""


def _is_clock(name: str) -> bool:
    return any(part in name for part in CLOCKS)


def _without_clocks(value: Any) -> Any:
    """Remove clocks, and the directory of the file that a sample's row is from."""
    if isinstance(value, dict):
        kept = {name: _without_clocks(each) for name, each in value.items() if not _is_clock(name)}
        return kept | ({"row": value["row"].rpartition("/")[2]} if isinstance(value.get("row"), str) else {})
    return [_without_clocks(each) for each in value] if isinstance(value, list) else value


def contents(run: Path) -> dict[str, Any]:
    """Read what a finished run leaves: models, rows of metrics, samples, evaluations and the best checkpoint's record.

    Clocks are left out, and the log of what happened. Checkpoints are not compared file by file: which of them are
    retained depends on where a run was stopped, and orbax stores times in them.
    """
    result: dict[str, Any] = {}
    for path in sorted(run.rglob("*")):
        name = path.relative_to(run).as_posix()
        if (
            not path.is_file()
            or "/checkpoints/" in name
            or path.name.startswith(".")
            or name == "events.jsonl"
        ):
            continue
        if path.suffix == ".safetensors":
            result[name] = path.read_bytes()
        elif path.suffix == ".jsonl":
            result[name] = [_without_clocks(json.loads(line)) for line in path.read_bytes().splitlines()]
        elif path.suffix == ".npz":
            with np.load(path) as arrays:
                result[name] = {key: arrays[key].tobytes() for key in arrays.files}
    return result


def differences(expected: Path, actual: Path) -> list[str]:
    """List what differs between two finished runs, one line per file."""
    before, after = contents(expected), contents(actual)
    lines = [f"{name} is missing" for name in before if name not in after]
    lines += [f"{name} is there, and is not expected" for name in after if name not in before]
    for name in before.keys() & after.keys():
        if before[name] != after[name]:
            lines.append(f"{name} differs: {_first_difference(before[name], after[name])}")
    return lines


def _first_difference(before: Any, after: Any) -> str:
    if isinstance(before, list) and isinstance(after, list):
        pairs = zip(before, after, strict=False)
        for i, (x, y) in enumerate(pairs):
            if x != y:
                return f"row {i + 1}: {str(x)[:300]} became {str(y)[:300]}"
        return f"{len(before)} rows became {len(after)}"
    return f"{len(before)} bytes, {len(after)} now"
