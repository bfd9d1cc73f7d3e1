"""Record losses and gradients of TRL's CPOTrainer and ORPOTrainer, in TRL's environment.

    ../trl/bin/python benchmarks/interop/trl_losses.py

Writes tests/plugins/dpo/trl.json, which tests/plugins/dpo/test_trl.py compares with. The rows are few, all of one
micro-batch, and TRL tokenises, pads and masks them. The model is a table of logits by the token before, so that a
gradient is a small table too.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

RECORDED = Path(__file__).resolve().parents[2] / "tests/plugins/dpo/trl.json"
WORDS = ("<pad>", "<eos>", "a", "b", "c", "d", "e")
# A prompt of one token: ORPO of TRL takes the likelihood over prompt and completion, and a first token has none.
# Chosen completions of one length: TRL averages their likelihood over the tokens of the batch, the paper over pairs.
ROWS = (
    {"prompt": "a", "chosen": " b c d", "rejected": " e"},
    {"prompt": "b", "chosen": " a a e", "rejected": " c d e a b"},
    {"prompt": "c", "chosen": " d b c", "rejected": " d b"},
)
CASES: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("cpo", {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 1.0, "beta": 2.0}, {"name": "simpo"}),
    (
        "cpo",
        {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 0.5, "beta": 3.0},
        {"name": "simpo", "gamma": 0.5},
    ),
    ("cpo", {"loss_type": "sigmoid", "cpo_alpha": 1.0, "beta": 0.1}, {"name": "cpo"}),
    ("cpo", {"loss_type": "sigmoid", "cpo_alpha": 0.3, "beta": 0.5}, {"name": "cpo", "alpha": 0.3}),
    ("orpo", {"beta": 0.1}, {"name": "orpo"}),
    ("orpo", {"beta": 2.0}, {"name": "orpo", "weight": 2.0}),
)
"""(trainer, TRL's options, our loss)."""


class Bigram(torch.nn.Module):
    """A language model whose logits depend on the token before alone."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(logits)

    def forward(self, input_ids: torch.Tensor, **options: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[input_ids])


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def open_trainer(kind: str, options: dict[str, Any], directory: str) -> Any:
    """Make TRL's trainer as its users do; its own model is not read."""
    config, trainer = {"cpo": (CPOConfig, CPOTrainer), "orpo": (ORPOConfig, ORPOTrainer)}[kind]
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), **sizes))
    arguments = config(
        output_dir=directory, use_cpu=True, report_to="none", remove_unused_columns=False, **options
    )
    rows = Dataset.from_list([dict(row) for row in ROWS])
    return trainer(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer())


def main() -> None:
    logits = torch.sin(torch.arange(len(WORDS) ** 2, dtype=torch.float32) * 1.7).reshape(len(WORDS), -1) * 2
    cases, rows = [], None
    with tempfile.TemporaryDirectory() as directory:
        for kind, options, ours in CASES:
            trainer = open_trainer(kind, options, directory)
            tokenized = [trainer.train_dataset[i] for i in range(len(ROWS))]
            model = Bigram(logits.clone())
            loss, _ = trainer.get_batch_loss_metrics(model, trainer.data_collator(tokenized))
            loss.backward()
            sides = {
                side: [{key: row[f"{side}_{key}"] for key in ("input_ids", "labels")} for row in tokenized]
                for side in ("chosen", "rejected")
            }
            assert rows in (None, sides)
            rows = sides
            found = {"loss": loss.item(), "gradient": model.table.grad.tolist()}
            cases.append({"trainer": kind, "options": options, "ours": ours, **found})
    recorded = {"trl": trl.__version__, "torch": torch.__version__, "logits": logits.tolist(), "rows": rows}
    lines = [f'"{name}": {json.dumps(value)}' for name, value in recorded.items()]
    lines.append('"cases": [\n' + ",\n".join(map(json.dumps, cases)) + "\n]")
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    for case in cases:
        print(case["trainer"], case["options"], case["loss"])


if __name__ == "__main__":
    main()
