"""Losses, KL estimates and gradient norms of TRL's KTOTrainer, for tests/plugins/kto/test_trl.py.

    TORCH_PYTHON benchmarks/interop/kto.py tests/plugins/kto/trl.json

TORCH_PYTHON: the interpreter of an environment with PyTorch, transformers, datasets and TRL. The model is a tiny Llama
whose weights are a formula, the tokenizer one of single letters; an update is one micro-batch of plain descent.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

LETTERS = "abcdefghijklmnopqrst"
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": len(LETTERS) + 2,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
BATCH, STEPS, RATE, BETA = 4, 6, 1.0, 0.4
WEIGHTS = {"desirable_weight": 1.5, "undesirable_weight": 0.75}
KEPT = ("loss", "grad_norm", "kl", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen")


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Make a weight from its name and shape, float32; those of norms are 1."""
    if "norm" in name:
        return np.ones(shape, np.float32)
    wave = np.cos(1.7 * np.arange(np.prod(shape)) ** 1.5 + sum(map(ord, name)))
    return (0.6 * wave).reshape(shape).astype(np.float32)


def make_rows(count: int) -> list[dict[str, Any]]:
    """Draw rows of letters, of which one in four is undesirable."""
    draw = random.Random(5)

    def words(low: int, high: int) -> str:
        return " ".join(draw.choices(LETTERS, k=draw.randint(low, high)))

    return [
        {"prompt": words(2, 5), "completion": " " + words(1, 6), "label": i % 4 != 2} for i in range(count)
    ]


def make_tokenizer() -> Any:
    """Make a tokenizer of single letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {token: i for i, token in enumerate(("<pad>", "</s>", *LETTERS))}
    backend = Tokenizer(models.WordLevel(known, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>")


def train(loss_type: str, rows: list[dict[str, Any]], tokenizer: Any) -> list[dict[str, float]]:
    """Train for some updates in the order of the rows; return the metrics of each."""
    import torch
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import KTOConfig, KTOTrainer

    def make_model() -> Any:
        model = LlamaForCausalLM(LlamaConfig(**MODEL, attn_implementation="eager")).float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.from_numpy(weight(name, tuple(parameter.shape))))
        return model

    with tempfile.TemporaryDirectory() as directory:
        settings = KTOConfig(
            output_dir=directory,
            loss_type=loss_type,
            beta=BETA,
            **WEIGHTS,
            per_device_train_batch_size=BATCH,
            max_steps=STEPS,
            learning_rate=RATE,
            optim="sgd",
            lr_scheduler_type="constant",
            max_grad_norm=1e9,
            logging_steps=1,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
        )
        trainer = KTOTrainer(
            model=make_model(),
            ref_model=make_model(),
            args=settings,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
        )
        trainer.train()
        logged = trainer.state.log_history
    return [{name: row[name] for name in KEPT if name in row} for row in logged if "loss" in row]


def main() -> None:
    import torch
    import transformers
    import trl

    rows = make_rows(12)
    tokenizer = make_tokenizer()
    found = {
        "versions": {each.__name__: each.__version__ for each in (torch, transformers, trl)},
        "model": MODEL,
        "rows": rows,
        "settings": {"beta": BETA, "learning_rate": RATE, "batch": BATCH, **WEIGHTS},
        "steps": {loss: train(loss, rows, tokenizer) for loss in ("kto", "apo_zero_unpaired")},
    }
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
