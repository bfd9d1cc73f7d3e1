"""The DPO trainer from Python: metrics, the reference read once, continuing, what it learns, what it refuses."""

import warnings

import numpy as np
import pytest
from rlhf_dpo import DPOConfig, DPOTrainer, completion_logps, evaluation_step

from rlhf_core import create_state, load_model, optimizers
from rlhf_core.errors import InputError
from tests.shared.interrupts import interrupt

REWARDS = {f"rewards/{name}" for name in ("chosen", "rejected", "accuracies", "margins")}
NAMES = REWARDS | {"logps/chosen", "logps/rejected", "loss"}
SHORT = {"learning_rate": 1e-2, "total_batch_size": 4, "max_training_steps": 6, "log_steps": 1, "beta": 0.5}
SIDES = ("chosen", "rejected")


def padded(tokenizer, rows):
    """The rows as a batch of `training_step`, without its reference."""
    batch = {}
    for side in SIDES:
        prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]
        ids = [[*tokenizer(row["prompt"] + row[side])["input_ids"], tokenizer.eos_token_id] for row in rows]
        width = max(map(len, ids))
        fill = [width - len(i) for i in ids]
        batch |= {
            f"input_ids_{side}": np.array([i + [0] * n for i, n in zip(ids, fill, strict=True)]),
            f"attention_mask_{side}": np.array([[1] * (width - n) + [0] * n for n in fill]),
            f"completion_mask_{side}": np.array(
                [
                    [0] * len(p) + [1] * (width - n - len(p)) + [0] * n
                    for p, n in zip(prompts, fill, strict=True)
                ]
            ),
        }
    return batch


def referenced(model, batch):
    parts = ("input_ids", "attention_mask", "completion_mask")
    own = {f"ref_logps_{s}": completion_logps(model, *(batch[f"{p}_{s}"] for p in parts)) for s in SIDES}
    return batch | own


def numbers(metrics):
    return {name: float(x) for name, x in metrics.items()}


@pytest.mark.parametrize("loss", ["sigmoid", pytest.param("ipo", marks=pytest.mark.long), "simpo"])
def test_the_trainer_reports_what_the_functions_compute(tiny, tmp_path, loss, capsys):
    """Held-out metrics before and after, against `evaluation_step` with the starting model as reference, if any."""
    model, held_out = tiny.make_model(scale=4.0), tiny.pairs(7, seed=5)
    config = DPOConfig(
        **SHORT, loss=loss, save_directory=tmp_path, eval_on_start=True, evaluation_steps=3, eval_batch_size=3
    )
    result = DPOTrainer(config, model=model, train_dataset=tiny.pairs(11), eval_dataset=held_out).train()
    assert (result.artifact.name, result.artifact.kind) == ("model", "language_model")
    rows = tiny.read_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if "eval_loss" in row] == [0, 3, 6]
    assert set(result.metrics) >= NAMES | {f"eval_{name}" for name in NAMES} | {"grad_norm", "num_tokens"}
    batch = padded(model.tokenizer, held_out)
    if loss == "simpo":
        assert "reading the log-probabilities" not in capsys.readouterr().err
    else:
        assert all(rows[0][f"eval_{name}"] == 0 for name in REWARDS)  # the policy is its own reference
        batch = referenced(model, batch)
    trained = load_model(result.artifact.path, mesh=tiny.one_device())
    state = create_state(trained, optimizers.optax.identity())
    expected = numbers(evaluation_step(state, batch, beta=0.5, loss_type=loss))
    found = {name: result.metrics[f"eval_{name}"] for name in expected}
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_only_pairs_that_updates_reach_are_read(tiny, tmp_path, capsys):
    config = DPOConfig(**{**SHORT, "max_training_steps": 2})
    tiny.run("dpo", config, tmp_path, model=tiny.make_model(scale=4.0), train_dataset=tiny.pairs(11))
    assert "log-probabilities of 8 pairs" in capsys.readouterr().err


@pytest.mark.long
def test_with_adapters_the_reference_is_what_the_stage_began_with(tiny, tmp_path):
    tiny.make_model(scale=4.0).save(tmp_path / "base")
    lora, start = {"rank": 2, "alpha": 8.0, "dropout": 0.2}, str(tmp_path / "base")
    for at in ("first", "second"):  # the second goes on with adapters that have an effect already
        config = DPOConfig(
            **SHORT, lora=lora, save_directory=tmp_path / at, eval_on_start=True, evaluation_steps=3
        )
        result = DPOTrainer(
            config, model=start, train_dataset=tiny.pairs(11), eval_dataset=tiny.pairs(5)
        ).train()
        first, *_, last = tiny.read_rows(tmp_path / at / "metrics.jsonl")
        assert first["eval_rewards/margins"] == 0
        assert last["eval_rewards/margins"] != 0
        start = str(result.artifact.path)
    assert (result.artifact.path / "adapter_config.json").is_file()


def test_unread_margins_are_reported(tiny, tmp_path):
    """A reward model's loss has a margin; no loss here has."""
    rows = [{key: x for key, x in row.items() if key != "margin"} for row in tiny.pairs(8)]
    config = DPOConfig(**{**SHORT, "max_training_steps": 1}, save_directory=tmp_path / "a")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        plain = DPOTrainer(config, model=tiny.make_model(scale=4.0), train_dataset=rows).train()
    rows = [
        {**row, "margin": margin} for row, margin in zip(rows, [0, 1.5, None, -2, 0, 0, 0, 0], strict=True)
    ]
    told = r"stage 'dpo'\.train_data: 8 pairs: 8 kept, 2 whose margin is ignored \(first dataset row 2\)"
    with pytest.warns(UserWarning, match=told):
        with_margins = DPOTrainer(
            config.replace(save_directory=tmp_path / "b"),
            model=tiny.make_model(scale=4.0),
            train_dataset=rows,
        ).train()
    assert with_margins.metrics["loss"] == plain.metrics["loss"]


@pytest.mark.long
def test_a_run_that_accepts_mended_pairs_reads_their_reference(tiny, tmp_path, capsys):
    rows = tiny.pairs(11)
    mended = [{**row, "chosen": " q r s"} if i == 7 else row for i, row in enumerate(rows)]
    config = DPOConfig(**SHORT, save_steps=1, save_directory=str(tmp_path))
    given = {"model": tiny.make_model(scale=4.0)}
    with pytest.raises(KeyboardInterrupt):
        DPOTrainer(config, train_dataset=rows, callbacks=[interrupt(3)], **given).train()
    with pytest.raises(InputError, match='accept=\\["train_data"\\]'):
        DPOTrainer(config, train_dataset=mended, **given).train()
    with pytest.warns(UserWarning, match="continues after update 2 with what was accepted: train_data"):
        DPOTrainer(config, train_dataset=mended, accept=["train_data"], **given).train()
    assert "reading the log-probabilities of 1 more pairs of train_data" in capsys.readouterr().err


def test_config_names():
    config = DPOConfig(loss_type="robust", label_smoothing=0.1, beta=0.2)
    assert config.loss.to_dict() == {"name": "robust", "label_smoothing": 0.1}
    assert (config.loss_type, config.label_smoothing, config.beta) == ("robust", 0.1, 0.2)
    assert DPOConfig.from_dict(config.to_dict()) == config
    assert (DPOConfig().loss_type, DPOConfig().label_smoothing, DPOConfig().learning_rate) == (
        "sigmoid",
        0,
        1e-6,
    )
    simpo = DPOConfig(loss_type="simpo")
    assert (DPOConfig().beta, simpo.beta, DPOConfig(loss="simpo", beta=0.1).beta) == (0.1, 2.0, 0.1)
    assert (simpo.replace(loss="cpo").beta, simpo.replace(loss={"name": "simpo", "gamma": 0.5}).beta) == (
        0.1,
        2.0,
    )
    assert DPOConfig.from_json(simpo.to_json()) == simpo


def test_a_check_tells_that_no_reference_is_kept(place, rlhf):
    """Warnings of these losses: tests/mistakes/trainers.py."""
    for loss, is_told in (("orpo", True), ("sigmoid", False)):
        place.settings("dpo.toml", f'loss = "{loss}"')
        said = " ".join(rlhf("check", "dpo.toml").out.split())
        assert ("no reference: 'orpo' compares with none, and none is computed or kept" in said) == is_told
