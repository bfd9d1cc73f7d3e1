"""The KTO trainer from Python: held-out metrics in float64, what may not change them, its rows, what it refuses."""

import warnings

import numpy as np
import pytest
from rlhf_kto import KTOConfig, KTOTrainer

from rlhf_core import load_model
from rlhf_core.errors import InputError
from tests.shared.interrupts import interrupt

SHORT = {"learning_rate": 1e-2, "total_batch_size": 4, "max_training_steps": 4, "log_steps": 1, "beta": 0.5}


def labelled(tiny, count, seed=0):
    return [{**row, "label": i % 2 == 0} for i, row in enumerate(tiny.texts(count, seed))]


def log_ratios(models, tokenizer, prompts, completions):
    """Sums of log π − log π_ref over the tokens of completions, end of text included, float64."""
    found = []
    for prompt, completion in zip(prompts, completions, strict=True):
        start = len(tokenizer(prompt)["input_ids"])
        ids = np.array([*tokenizer(prompt + completion)["input_ids"], tokenizer.eos_token_id])
        sums = []
        for model in models:
            logits = np.asarray(model.logits(ids[None], np.ones((1, len(ids)), int))[0], np.float64)
            logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            sums.append(sum(logps[t - 1, ids[t]] for t in range(start, len(ids))))
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


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["all", "adapters"])
def test_a_resumed_run_ends_with_the_same_bits(lora, tiny, tmp_path):
    """The reference of mismatched completions is the model that the stage began with, not that of the checkpoint."""
    tiny.make_model(scale=4.0).save(tmp_path / "base")
    config = KTOConfig(**SHORT, lora=lora, save_steps=1)
    given = {"model": str(tmp_path / "base"), "train_dataset": labelled(tiny, 11)}
    whole = tiny.run("kto", config, tmp_path / "whole", **given)
    for count in (1, 3):
        with pytest.raises(KeyboardInterrupt):
            tiny.run("kto", config, tmp_path / "parts", listeners=[interrupt(count)], **given)
    parts = tiny.run("kto", config, tmp_path / "parts", **given)
    name = "adapter_model.safetensors" if lora else "model.safetensors"
    assert (whole.path / name).read_bytes() == (parts.path / name).read_bytes()
    kl = [[row["kl"] for row in tiny.read_rows(tmp_path / at / "metrics.jsonl")] for at in ("whole", "parts")]
    assert kl[0] == kl[1]
    assert max(kl[0]) > 0


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


def test_rows_that_cannot_be_trained_on_are_named(tiny, tmp_path):
    def error(rows, evaluated=None, **changes):
        config = KTOConfig(**{**SHORT, **changes})
        with pytest.raises(InputError) as raised:
            tiny.run(
                "kto",
                config,
                tmp_path,
                model=tiny.make_model(),
                train_dataset=rows,
                **({} if evaluated is None else {"eval_dataset": evaluated}),
            )
        return str(raised.value)

    rows = labelled(tiny, 9)
    wrong = [{**rows[0], "label": 0.5}, {name: rows[0][name] for name in ("prompt", "completion")}]
    said = error([*rows, *wrong]).splitlines()
    assert said[0].startswith("stage 'kto'.train_data: dataset row 10: 'label' is 0.5; give true or false")
    assert said[1].startswith("stage 'kto'.train_data: dataset row 11: 'label' is null")
    assert "'label' is 2" in error(rows, {"easy": rows, "hard": [{**rows[0], "label": 2}]})
    assert "eval_data: 1 row; the estimate" in error(rows, rows[:1])
    assert "total_batch_size: updates of 1 row, and the estimate" in error(rows, total_batch_size=1)
    given = {"max_training_steps": None, "num_train_epochs": 1}
    assert "after 2 updates of 4 rows 1 is left for the last" in error(rows, **given)
    assert "set max_training_steps = 2" in error(rows, **given)


def test_labels_that_are_not_balanced_are_told(tiny, tmp_path):
    rows = tiny.texts(8)
    config = KTOConfig(**{**SHORT, "max_training_steps": 1}, loss="apo_zero_unpaired")

    def told(labels, at, **changes):
        given = {
            "model": tiny.make_model(),
            "train_dataset": [{**r, "label": x} for r, x in zip(rows, labels, strict=True)],
        }
        tiny.run("kto", config.replace(**changes), tmp_path / at, **given)

    with pytest.warns(UserWarning, match=r"6 desirable .* 3 times as much as 2 .*undesirable_weight = 2\.6"):
        told([1] * 6 + [0] * 2, "first")
    with pytest.warns(UserWarning, match="all 8 completions have the label false"):
        told([0] * 8, "second")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        told([1] * 6 + [0] * 2, "third", undesirable_weight=2.6)
        told([1] * 4 + [0] * 4, "fourth", total_batch_size=1)  # this loss needs no other row
