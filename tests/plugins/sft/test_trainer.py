"""The SFT trainer from Python: what is trained on, evaluated and kept."""

import numpy as np
import pytest
from rlhf_sft import SFTConfig, SFTTrainer

from rlhf_core import load_model

BASE = {"learning_rate": 1e-2, "total_batch_size": 4, "max_training_steps": 4, "log_steps": 1}


@pytest.fixture(scope="module")
def model(tiny):
    return tiny.make_model("lm", scale=4.0)


def mean_loss(model, tokenizer, rows):
    """−log p of the completions' tokens, EOS included, averaged over all of them, in float64 from the logits."""
    total, count, width = 0.0, 0, 16
    for row in rows:
        prompt = len(tokenizer(row.get("prompt", ""))["input_ids"])
        ids = [*tokenizer(row.get("prompt", "") + row.get("completion", row.get("text", "")))["input_ids"], 1]
        fill = [0] * (width - len(ids))  # so that all are computed by one program
        logits = np.asarray(model.logits([ids + fill], [[1] * len(ids) + fill]), np.float64)[
            0, : len(ids) - 1
        ]
        logits -= logits.max(-1, keepdims=True)
        own = logits[np.arange(len(ids) - 1), ids[1:]] - np.log(np.exp(logits).sum(-1))
        total -= own[max(prompt - 1, 0) :].sum()
        count += len(own[max(prompt - 1, 0) :])
    return total / count


def test_the_first_loss_and_the_evaluation_are_token_means(tiny, model, tmp_path):
    rows, held_out = tiny.texts(4), tiny.texts(7, seed=3)
    config = SFTConfig(**BASE, save_directory=tmp_path, eval_batch_size=3)
    result = SFTTrainer(config, model=model, train_dataset=rows, eval_dataset=held_out).train()
    assert result.artifact.kind == "language_model"
    logged = tiny.read_rows(tmp_path / "metrics.jsonl")
    tokenizer = tiny.make_tokenizer()
    assert logged[0]["loss"] == pytest.approx(mean_loss(model, tokenizer, rows), rel=1e-5)
    trained = load_model(result.artifact.path)
    assert result.metrics["eval_loss"] == pytest.approx(mean_loss(trained, tokenizer, held_out), rel=1e-5)
    assert logged[-1]["loss"] < logged[0]["loss"]
    assert {"loss", "entropy", "grad_norm", "learning_rate", "epoch", "num_tokens"} <= set(result.metrics)


def test_text_rows_are_trained_on_whole(tiny, model, tmp_path):
    rows = [{"text": row["prompt"] + row["completion"]} for row in tiny.texts(4)]
    result = SFTTrainer(
        SFTConfig(**{**BASE, "max_training_steps": 1}, save_directory=tmp_path),
        model=model,
        train_dataset=rows,
    ).train()
    assert result.metrics["loss"] == pytest.approx(mean_loss(model, tiny.make_tokenizer(), rows), rel=1e-5)
