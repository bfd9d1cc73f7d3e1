"""Memory and time that a data set costs before its first update, beside those of a small one.

    python benchmarks/data/measure.py --trainer reward --rows 200000 --tokenizer DIR

writes generated rows of about 300 tokens, starts a trainer on 200 and on all of them, twice, each in a process of its
own, the first time with an empty cache of tokens. Prints what every run took: seconds up to the end of the first
update, seconds of the processors for all of it, and the largest memory of the process, also above that of 200 rows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SMALL = 200
WORDS = [
    "the",
    "a",
    "model",
    "data",
    "row",
    "number",
    "of",
    "and",
    "is",
    "in",
    "two",
    "three",
    "sum",
    "answer",
    "cat",
]
WORDS += [
    "tree",
    "house",
    "green",
    "reads",
    "writes",
    "slowly",
    "then",
    "because",
    "never",
    "always",
    "9",
    "42",
    ".",
]
MODEL = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
MODEL |= {"intermediate_size": 16}


def rows(trainer: str, count: int) -> Iterator[dict[str, Any]]:
    """Rows of about 300 tokens in all, of a tokenizer that knows such words."""
    draw = random.Random(0)

    def text(words: int) -> str:
        return " ".join(draw.choices(WORDS, k=words))

    for i in range(count):
        match trainer:
            case "reward" | "dpo":
                yield {"prompt": text(70), "chosen": f" {text(70)} {i}", "rejected": f" {text(70)} {i}"}
            case "sft":
                yield {"prompt": text(70), "completion": f" {text(140)} {i}"}
            case _:
                yield {"prompt": f"{text(200)} {i}", "answer": str(i)}


def run(trainer: str, file: str, tokenizer: str, directory: str) -> None:
    """One update of a trainer on this file; prints the seconds since the process started, and its memory."""
    begun = time.time()
    import importlib

    package = importlib.import_module(f"rlhf_{trainer}")
    name = {"reward": "Reward", "sft": "SFT", "dpo": "DPO", "grpo": "GRPO"}[trainer]
    options: dict[str, Any] = {"total_batch_size": 8, "max_training_steps": 1, "log_steps": 1}
    inputs: dict[str, Any] = {}
    if trainer == "grpo":
        options |= {"max_completion_length": 8, "num_preview_samples": 0}
        inputs["rewards"] = [lambda completions: [float(len(text)) for text in completions]]
    config = getattr(package, f"{name}Config")(save_directory=directory, progress_bar_type="json", **options)
    model = {**MODEL, "tokenizer": tokenizer, "max_position_embeddings": 1024}
    getattr(package, f"{name}Trainer")(config, model=model, train_dataset=file, **inputs).train()
    metrics = json.loads((Path(directory) / "metrics.jsonl").read_text().splitlines()[0])
    first_update = metrics["time"] - begun
    used = resource.getrusage(resource.RUSAGE_SELF)
    peak = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(json.dumps({"first_update": first_update, "cpu": used.ru_utime + used.ru_stime, "peak": peak}))


def measured(trainer: str, file: Path, tokenizer: str, cache: Path) -> dict[str, float]:
    """Do the same in its own process."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, __file__, "--run", trainer, str(file), tokenizer, directory]
        done = subprocess.run(
            command,
            env={**os.environ, "RLHF_CACHE": str(cache)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trainer", default="reward", choices=["reward", "sft", "dpo", "grpo"])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--tokenizer", required=True)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        files = {}
        for count in (SMALL, given.rows):
            files[count] = Path(scratch) / f"{count}.jsonl"
            with files[count].open("w") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows(given.trainer, count))
        least: dict[str, float] = {}  # of 200 rows, by state
        for count, state in ((SMALL, "cold"), (SMALL, "warm"), (given.rows, "cold"), (given.rows, "warm")):
            found = measured(given.trainer, files[count], given.tokenizer, Path(scratch) / "cache")
            above = found["peak"] - least.setdefault(state, found["peak"])
            print(
                f"{given.trainer:6} {count:9,} rows {state}: first update after {found['first_update']:6.1f} s, "
                f"{found['cpu']:6.1f} CPU s in all, {found['peak'] / 1e9:5.2f} GB, {above / 1e9:+5.2f} GB",
                flush=True,
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run(*sys.argv[2:])
    else:
        main()
