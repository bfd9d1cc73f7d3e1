"""The SFT trainer from Python: what is trained on, evaluated and kept."""

import pytest
from rlhf_sft import SFTConfig, SFTTrainer

from rlhf_core import load_model
from tests.shared.samplers import full_logps

BASE = {"learning_rate": 1e-2, "total_batch_size": 4, "max_training_steps": 4, "log_steps": 1}


@pytest.fixture(scope="module")
def model(tiny):
    return tiny.make_model("lm", scale=4.0)


def mean_loss(model, tokenizer, rows):
    """−log p of the completions' tokens, EOS included, averaged over all of them, in float64 from the logits."""
    total, count = 0.0, 0
    for row in rows:
        text = row.get("prompt", "") + row.get("completion", row.get("text", ""))
        ids = [*tokenizer(text)["input_ids"], 1]
        start = max(len(tokenizer(row.get("prompt", ""))["input_ids"]), 1)
        logps = full_logps(model.definition, model.params, ids[:start], ids[start:])
        total -= logps.sum()
        count += len(logps)
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
