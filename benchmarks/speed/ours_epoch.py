"""W6: an epoch of our reward trainer, from text to a trained model on disk."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import works
from ours_steps import fresh
from rlhf_reward import RewardConfig, RewardTrainer

from rlhf_core import data
from rlhf_core.packing.trees import Tree
from rlhf_core.tokenizer import load_tokenizer


def run_epoch(task: works.Task) -> dict[str, Any]:
    """Timed: from the texts as Python objects and the model in memory until the trainer has saved what it trained."""
    with tempfile.TemporaryDirectory(prefix="speed-") as directory:
        place = Path(directory)
        os.environ["RLHF_CACHE"] = str(place / "cache")  # no token ids of an earlier run
        rows, longest = works.epoch_rows(task)
        files = task.tokenizer or works.write_tokenizer(place / "tokenizer", task.model.vocab, stops=True)
        tokenizer = load_tokenizer(files)
        model = fresh(task.model, "score")
        config = RewardConfig(
            total_batch_size=works.PAIRS,
            num_train_epochs=1,
            max_sequence_length=longest,
            learning_rate=works.LEARNING_RATE,
            optimizer="adamw",
            save_directory=str(place / "run"),
            seed=works.SEED,
        )
        began = time.perf_counter()
        RewardTrainer(config, model=model, tokenizer=tokenizer, train_dataset=rows).train()
        seconds = time.perf_counter() - began
        plan = json.loads((place / "run" / "plan.json").read_text())
        return {"seconds": [seconds], "updates": plan["updates"], "groups": read(rows, tokenizer, longest)}


def read(rows: list[dict[str, Any]], tokenizer: Any, longest: int) -> list[tuple[int, tuple[int, ...]]]:
    """The lengths of what the epoch reads: each pair's shared prompt and its two replies."""
    pairs = data.encode_pairs(data.load(rows), tokenizer, max_length=longest)

    def lengths(tree: Tree) -> tuple[int, tuple[int, ...]]:
        return len(tree.prefix), tuple(map(len, tree.branches))

    return [lengths(tree) for tree in pairs]
