"""The KTO trainer from Python: held-out metrics in float64, what may not change them, its rows, what it refuses."""

import numpy as np
import pytest
from rlhf_kto import KTOConfig, KTOTrainer

from rlhf_core import load_model
from tests.shared.samplers import full_logps

SHORT = {"learning_rate": 1e-2, "total_batch_size": 4, "max_training_steps": 4, "log_steps": 1, "beta": 0.5}


def labelled(tiny, count, seed=0):
    return [{**row, "label": i % 2 == 0} for i, row in enumerate(tiny.texts(count, seed))]


def log_ratios(models, tokenizer, prompts, completions):
    """Sums of log π − log π_ref over the tokens of completions, end of text included, float64."""
    found = []
    for prompt, completion in zip(prompts, completions, strict=True):
        start = len(tokenizer(prompt)["input_ids"])
        ids = [*tokenizer(prompt + completion)["input_ids"], tokenizer.eos_token_id]
        sums = [full_logps(each.definition, each.params, ids[:start], ids[start:]).sum() for each in models]
        found.append(sums[0] - sums[1])
    return np.array(found)


def test_held_out_metrics_equal_the_definition_whatever_the_batches_are(tiny, tmp_path):
    rows = labelled(tiny, 7, seed=5)
    results = {}
    for size in (2, 7):
        config = KTOConfig(
            **SHORT, desirable_weight=0.4, eval_batch_size=size, save_directory=tmp_path / str(size)
        )
        good = [
            {**row, "label": i % 4 > 0} for i, row in enumerate(tiny.texts(12))
        ]  # so that the KL is above 0
        given = {"train_dataset": good, "eval_dataset": rows}
        results[size] = KTOTrainer(config, model=tiny.make_model(scale=4.0), **given).train()
    start = tiny.make_model(scale=4.0)
    models = (load_model(results[2].artifact.path, mesh=tiny.one_device()), start)
    prompts, completions = ([row[name] for row in rows] for name in ("prompt", "completion"))
    good = np.array([row["label"] for row in rows])
    ratio = log_ratios(models, start.tokenizer, prompts, completions)
    shifted = log_ratios(models, start.tokenizer, prompts, [*completions[1:], completions[0]])
    assert shifted.mean() > 0.1
    gain = np.where(good, 1, -1) * (ratio - shifted.mean())
    expected = {
        "eval_kl": shifted.mean(),
        "eval_loss": (np.where(good, 0.4, 1) / (1 + np.exp(0.5 * gain))).mean(),
        "eval_rewards/chosen": 0.5 * ratio[good].mean(),
        "eval_rewards/rejected": 0.5 * ratio[~good].mean(),
        "eval_rewards/margins": 0.5 * (ratio[good].mean() - ratio[~good].mean()),
        "eval_rewards/accuracies": (gain > 0).mean(),
    }
    for result in results.values():
        found = {name: result.metrics[name] for name in expected}
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_no_completion_is_mismatched_with_its_own_prompt(tiny, tmp_path):
    """Epochs end within updates: here every row follows itself, and its own log-ratio, which grows, does not count."""
    row = {**tiny.texts(1)[0], "label": True}
    with pytest.warns(UserWarning, match="all 1 completions"):
        tiny.run("kto", KTOConfig(**SHORT), tmp_path, model=tiny.make_model(scale=4.0), train_dataset=[row])
    last = tiny.read_rows(tmp_path / "metrics.jsonl")[-1]
    assert last["rewards/chosen"] > 0.1
    assert last["kl"] == 0


def test_a_preference_is_two_rows_and_labels_have_spellings(tiny, tmp_path):
    pairs = [{name: row[name] for name in ("prompt", "chosen", "rejected")} for row in tiny.pairs(6)]
    halves = [
        {"prompt": row["prompt"], "completion": row[side], "label": label}
        for row in pairs
        for side, label in (("chosen", "True"), ("rejected", 0))
    ]
    losses = []
    for name, rows in (("pairs", pairs), ("halves", halves)):
        tiny.run(
            "kto",
            KTOConfig(**SHORT),
            tmp_path / name,
            model=tiny.make_model(scale=4.0),
            train_dataset=rows,
        )
        losses.append([row["loss"] for row in tiny.read_rows(tmp_path / name / "metrics.jsonl")])
    assert losses[0] == losses[1]
