"""Train what is to be opened elsewhere, with rlhf-sft and rlhf-reward, and compute what it gives here.

    python benchmarks/interop/prepare.py [--pretrained MODEL] [--seed 0] [--case llama …]

In runs/interop/seedN/CASE: `base`, a language model with fresh weights, or MODEL's; `reward`, a reward model; `adapter`
and `reward-adapter`, LoRA on base; `merged` and `reward-merged`, what `rlhf export --merge` makes of them; `ours.npz`,
the tokens of a batch and our logits and scores of it.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import task
from rlhf_reward import RewardConfig, RewardTrainer
from rlhf_sft import SFTConfig, SFTTrainer
from rlhf_tools.export import export
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlhf_core import load_model
from rlhf_core.models import fresh_model
from rlhf_core.tokenizer.encoding import Encoder

LORA = {"rank": 4, "alpha": 8.0, "targets": "all-linear"}


def tokenizer() -> Any:
    """Train a byte-level BPE, which every family's class in transformers can read, with its own padding token."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|endoftext|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=task.VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([" ".join(task.WORDS)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=special[1], pad_token=special[0])


def settings(place: Path, name: str, seed: int, **more: Any) -> dict[str, Any]:
    return {
        "model": str(place / "base"),
        "train_data": str(place / f"{name}.jsonl"),
        "max_training_steps": task.UPDATES,
        "total_batch_size": task.BATCH,
        "learning_rate": 1e-2 if "lora" in more else 1e-3,
        "progress_bar_type": "json",
        "save_directory": str(place / "runs" / name),
        "seed": seed,
        **more,
    }


def train(place: Path, seed: int) -> None:
    """`reward`, `adapter`, `reward-adapter` and the merged ones."""
    rows = task.pairs(seed, task.UPDATES * task.BATCH)
    for name in ("reward", "reward-adapter"):
        task.write(place / f"{name}.jsonl", rows)
    texts = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
    task.write(place / "adapter.jsonl", texts)
    made = {
        "reward": RewardTrainer(RewardConfig(**settings(place, "reward", seed))),
        "adapter": SFTTrainer(SFTConfig(**settings(place, "adapter", seed, lora=LORA))),
        "reward-adapter": RewardTrainer(RewardConfig(**settings(place, "reward-adapter", seed, lora=LORA))),
    }
    for name, trainer in made.items():
        shutil.copytree(trainer.train().artifact.path, place / name)
    export(str(place / "adapter"), place / "merged", merge=True)
    export(str(place / "reward-adapter"), place / "reward-merged", merge=True)


def batch(place: Path, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids, mask) int32 [B, T], padded on the right: held-out texts as a reward model is given them."""
    encoder = Encoder(load_model(place / "base").tokenizer)
    rows = task.pairs(1000 + seed, task.BATCH)
    found = encoder.whole([row["prompt"] for row in rows], [row["chosen"] for row in rows])
    ids = np.full((len(found), max(map(len, found))), encoder.special.pad, np.int32)
    mask = np.zeros_like(ids)
    for row, each, tokens in zip(ids, mask, found, strict=True):
        row[: len(tokens)], each[: len(tokens)] = tokens, 1
    return ids, mask


def prepare(case: str, seed: int, pretrained: str | None) -> None:
    place = task.directory(seed, case)
    shutil.rmtree(place, ignore_errors=True)
    if case == task.PRETRAINED:
        load_model(str(pretrained)).save(place / "base")
    else:
        fresh_model(task.table(case, seed), tokenizer=tokenizer(), seed=seed).save(place / "base")
    train(place, seed)
    ids, mask = batch(place, seed)
    np.savez(
        place / "ours.npz",
        ids=ids,
        mask=mask,
        base=load_model(place / "base").logits(ids, mask),
        adapter=load_model(place / "adapter").logits(ids, mask),
        reward=load_model(place / "reward", "score").scores(ids, mask),
        reward_adapter=load_model(place / "reward-adapter", "score").scores(ids, mask),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Models, adapters and our own numbers.")
    parser.add_argument("--pretrained", help="directory of a language model with a tokenizer")
    parser.add_argument("--seed", type=int, nargs="+", default=task.SEEDS)
    parser.add_argument("--case", nargs="+", choices=task.CASES, default=task.CASES)
    arguments = parser.parse_args()
    for seed in arguments.seed:
        for case in arguments.case:
            if case != task.PRETRAINED or arguments.pretrained:
                prepare(case, seed, arguments.pretrained)


if __name__ == "__main__":
    main()
