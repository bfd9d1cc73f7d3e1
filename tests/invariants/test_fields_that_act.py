"""Fields of configs in real runs: optimizers, schedules, checkpoints, evaluations, loggers and the console."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlhf_sft import SFTConfig

from rlhf_core import fit
from rlhf_core.errors import InputError
from rlhf_core.mesh import make_mesh
from rlhf_core.step import layer_norms
from tests.shared.interrupts import interrupt


def checkpoints(directory: Path) -> list[int]:
    return sorted(int(each.name) for each in directory.glob("checkpoints/[0-9]*"))


def interrupted(short: Any, at: str, step: int = 4, **given: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        short.train("sft", at=at, listeners=(interrupt(step),), save_steps=2, **given)


def equal(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(leaf, right[path]) for path, leaf in left.items())


def test_a_checkpoint_without_the_optimizer_s_state(
    short: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Momentum begins at 0 after update 2; the schedule goes on."""
    given = {"save_optimizer_state": False, "scheduler": "linear"}
    interrupted(short, "again", **given)
    again, watch = short.train("sft", at="again", **given)
    assert "the optimizer starts from a fresh state at update 2" in capsys.readouterr().err
    assert watch.steps() == [3, 4, 5, 6]
    rates = [row["learning_rate"] for row in watch.rows]
    np.testing.assert_allclose(rates, [1e-2 * (1 - i / 6) for i in (2, 3, 4, 5)], rtol=1e-6)
    whole, _ = short.train("sft", at="whole", scheduler="linear")
    assert not equal(whole, again)
    host = json.loads((tmp_path / "again/sft/checkpoints/6/host.json").read_text())
    assert not any(name.startswith("opt_state") for name in host["leaves"])
    assert host["host"]["optimizer_state"] is False


def test_a_run_begins_at_a_later_update(short: Any) -> None:
    """Of sgd, which has no moments, two runs of three updates and one of six differ by the first three alone."""
    given = {"optimizer": "sgd", "scheduler": "linear"}
    first, _ = short.train("sft", at="first", **given)
    later, watch = short.train("sft", at="later", step_start_point=3, **given)
    assert watch.steps() == [4, 5, 6]
    assert watch.rows[0]["learning_rate"] == pytest.approx(1e-2 * (1 - 3 / 6))
    assert watch.rows[0]["epoch"] == pytest.approx(16 / 11)
    assert not equal(first, later)


def test_the_last_checkpoint_the_one_that_was_loaded_and_a_run_that_starts_over(
    short: Any, tmp_path: Path
) -> None:
    whole, _ = short.train("sft", at="whole", do_last_save=False)
    assert checkpoints(tmp_path / "whole/sft") == []
    interrupted(short, "again", step=5)
    assert checkpoints(tmp_path / "again/sft") == [2, 4]
    again, _ = short.train("sft", at="again", remove_ckpt_after_load=True, do_last_save=False)
    assert checkpoints(tmp_path / "again/sft") == [2]
    assert equal(whole, again)
    interrupted(short, "anew")
    anew, watch = short.train("sft", at="anew", resume_if_possible=False)
    assert watch.steps() == [1, 2, 3, 4, 5, 6]
    assert equal(whole, anew)


def half(total: int) -> Any:
    """A schedule that halves the rate in the middle of the run."""
    return lambda step: jnp.where(step < total // 2, 1e-2, 5e-3)


def test_a_function_is_the_schedule(short: Any, tmp_path: Path) -> None:
    found, watch = short.train("sft", custom_scheduler=half)
    assert [row["learning_rate"] for row in watch.rows] == pytest.approx([1e-2] * 3 + [5e-3] * 3)
    file = tmp_path / "rates.py"
    file.write_text("import optax\n\ndef rate(total):\n    return optax.constant_schedule(1e-2)\n")
    constant, _ = short.train("sft", at="constant")
    named, _ = short.train("sft", at="named", scheduler=f"{file}:rate")
    assert equal(constant, named)
    assert not equal(constant, found)
    with pytest.raises(InputError, match=r"scheduler: .*rates\.py has no 'rat'\. Did you mean 'rate'\?"):
        short.train("sft", at="misspelt", scheduler=f"{file}:rat")


def test_moments_in_bfloat16(short: Any, tmp_path: Path) -> None:
    exact, _ = short.train("sft", at="exact")
    found, _ = short.train("sft", at="half", tx_mu_dtype="bfloat16")
    host = json.loads((tmp_path / "half/sft/checkpoints/6/host.json").read_text())
    kinds = {name.rsplit(".mu.")[0]: kind.partition("[")[0] for name, kind in host["leaves"].items()}
    assert {kind for name, kind in kinds.items() if name.endswith("opt_state.1.0")} == {"bfloat16"}
    assert not equal(exact, found)
    for path, leaf in exact.items():
        np.testing.assert_allclose(found[path], leaf, atol=2e-3)


def test_loggers_hear_of_every_third_update(short: Any) -> None:
    _, watch = short.train("sft", log_steps=4, report_steps=3)
    assert watch.steps() == [3, 4, 6]


def test_norms_of_layers() -> None:
    """That a run logs them: the golden pipeline sft."""
    draw = np.random.default_rng(0)
    grads = {
        "embed_tokens": {"embedding": draw.normal(size=(5, 3))},
        "layers": {
            "mlp": {"kernel": draw.normal(size=(2, 3, 4))},
            "norm": {"weight": draw.normal(size=(2, 3))},
        },
    }
    found = layer_norms(jax.tree.map(jnp.float32, grads), None)
    layers = [
        np.sqrt(
            sum(
                (leaf[i] ** 2).sum()
                for leaf in (grads["layers"]["mlp"]["kernel"], grads["layers"]["norm"]["weight"])
            )
        )
        for i in range(2)
    ]
    expected = {
        "embed_tokens": np.linalg.norm(grads["embed_tokens"]["embedding"]),
        "layers.0": layers[0],
        "layers.1": layers[1],
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6)


def test_columns_that_are_dropped_are_not_seen(short: Any) -> None:
    rows = [{**row, "bad": 1} for row in short.rows["grpo"]]

    def seen(completions: list[str], **columns: Any) -> list[float]:
        assert "bad" not in columns
        return [float(len(text)) for text in completions]

    with pytest.warns(
        UserWarning, match=r"drop_columns: train_data has no column 'bed'\. Did you mean 'bad'\?"
    ):
        short.train(
            "grpo",
            max_training_steps=1,
            num_iterations=1,
            ids_to_pop_from_dataset=["bad", "bed"],
            inputs={"train_dataset": rows, "rewards": [seen]},
        )


def test_no_evaluation_and_no_limit_where_asked(short: Any) -> None:
    rows = short.rows["sft"]
    _, watch = short.train("sft", max_training_steps=1, do_eval=False, inputs={"eval_dataset": rows})
    assert not any(name.startswith("eval_") for row in watch.rows for name in row)
    long = [{"prompt": "a", "completion": " b" * 1400}, *rows]
    _, watch = short.train(
        "sft",
        at="long",
        total_batch_size=12,
        max_training_steps=1,
        max_length=None,
        inputs={"train_dataset": long},
    )
    assert watch.rows[0]["num_tokens"] > 1400


def scaled(total: int, rate: float) -> Any:
    return lambda step: jnp.float32(rate)


class Falling:
    """A schedule as an object that is called."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, total: int) -> Any:
        return lambda step: self.rate * (1 - step / total)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Falling, "Falling"),
        pytest.param(lambda rate: partial(scaled, rate=rate), "scaled", marks=pytest.mark.long),
    ],
    ids=["object", "partial"],
)
def test_a_partial_and_an_object_are_schedules(short: Any, make: Any, name: str) -> None:
    assert SFTConfig(scheduler=make(1e-2)).to_dict()["scheduler"] == f"{__name__}:{name}"
    interrupted(short, "again", scheduler=make(1e-2))
    with pytest.raises(InputError, match="scheduler"):
        short.train("sft", at="again", scheduler=make(2e-2))
    _, watch = short.train("sft", at="again", scheduler=make(1e-2))
    assert watch.steps() == [3, 4, 5, 6]


@pytest.mark.parametrize("trainer", ["sft", "grpo"])
def test_a_stage_may_only_evaluate(short: Any, tmp_path: Path, trainer: str) -> None:
    rows = short.rows[trainer]
    given = {"do_train": False, "max_training_steps": None, "inputs": {"eval_dataset": rows[:4]}}
    found, watch = short.train(trainer, **given)
    again, _ = short.train(
        trainer,
        at="alone",
        step_start_point=3,
        **{**given, "inputs": {"train_dataset": None, "eval_dataset": rows[:4]}},
    )
    assert equal(found, again)
    with pytest.raises(
        InputError, match="train_data: missing, and so is eval_data: without training, give one"
    ):
        short.train(trainer, at="neither", **{**given, "inputs": {"train_dataset": None}})
    for path, leaf in short.tiny.leaves(short.models[trainer].params).items():
        np.testing.assert_array_equal(leaf, found[path], err_msg=path)
    (row,) = watch.rows
    assert row["step"] == 0
    assert any(name.startswith("eval_") for name in row)
    assert not any(name.startswith("grad_norm") for name in row)


def test_a_run_has_the_name_it_is_given(tiny: ModuleType, tmp_path: Path) -> None:
    from rlhf_sft import SFTTrainer

    config = SFTConfig(do_train=False, save_directory=tmp_path, trainer_prefix="sft", model_name="of/us")
    result = SFTTrainer(config, model=tiny.make_model(), train_dataset=tiny.texts(4)).train()
    assert Path(result.artifact.path) == tmp_path / "sft-of-us/artifacts/model"


# The formulas: tests/packages/core; how states are sharded: tests/packages/training/test_memory_devices.py.
@pytest.mark.long
@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_every_optimizer_learns_sharded_and_resumes_from_its_checkpoint(short: Any, name: str) -> None:
    given: dict[str, Any] = {"optimizer": name, "learning_rate": 3e-2, "save_steps": 3}
    given["inputs"] = {"mesh": make_mesh(data=2, fsdp=2, devices=jax.devices()[:4])}
    whole, watch = short.train("sft", at="whole", **given)
    losses = [row["loss"] for row in watch.rows]
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
    with pytest.raises(KeyboardInterrupt):
        short.train("sft", at="again", listeners=(interrupt(4),), **given)
    again, later = short.train("sft", at="again", **given)
    assert later.steps() == [4, 5, 6]
    for path, leaf in whole.items():
        np.testing.assert_array_equal(leaf, again[path], err_msg=path)


@pytest.mark.long
def test_saving_by_time(short: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on a minute a look."""
    now = iter(range(0, 10**6, 60))
    monkeypatch.setattr(fit.time, "perf_counter", lambda: float(next(now)))
    short.train("sft", at="seldom", save_interval_minutes=1e4)
    short.train("sft", at="often", save_interval_minutes=1e-3)
    # The last state is saved before the model is written, whatever the interval.
    assert checkpoints(tmp_path / "seldom" / "sft") == [6]
    assert checkpoints(tmp_path / "often" / "sft") == [1, 2, 3, 4, 5, 6]


def test_memory_is_tracked_where_asked_for(short: Any) -> None:
    _, watch = short.train("sft", max_training_steps=2, track_memory=True)
    assert all(row["memory/peak_rss_bytes"] > 2**20 for row in watch.rows)
    _, watch = short.train("sft", at="not", max_training_steps=2)
    assert not any(name.startswith("memory/") for row in watch.rows for name in row)


@pytest.mark.parametrize("progress", ["rich", "tqdm", "json"])
def test_the_console_shows_the_metrics_asked_for(
    short: Any, capsys: pytest.CaptureFixture[str], progress: str
) -> None:
    short.train(
        "sft", max_training_steps=2, progress_bar_type=progress, progress_metrics=["grad_norm", "absent"]
    )
    out, err = capsys.readouterr()
    if progress == "json":
        events = [json.loads(line) for line in out.splitlines()]
        assert [event["event"] for event in events] == ["start", "step", "step", "saved", "end"]
        return
    lines = [line for line in err.splitlines() if line.startswith(("[sft] 1/2", "[sft] 2/2"))]
    assert len(lines) == 2
    assert all("grad_norm" in line and "loss" not in line for line in lines)


def test_unknown_metrics_and_other_devices_are_refused_before_the_first_update(short: Any) -> None:
    with pytest.raises(InputError, match=r"does not report entrpy\. Did you mean 'eval_entropy'\?"):
        short.train(
            "sft",
            inputs={"eval_dataset": short.rows["sft"]},
            evaluation_steps=2,
            metric_for_best_model="entrpy",
            listeners=(interrupt(1),),
        )

    with pytest.raises(InputError, match=r"'sft'\.platform: the stage needs tpu, and jax runs on cpu here"):
        short.train("sft", max_training_steps=1, backend="tpu")
    assert short.train("sft", max_training_steps=1, backend="cpu")


def swapped(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]


def one_lesson(short: Any) -> list[dict[str, Any]]:
    """Pairs of which all say the same; on the swapped ones every update is one for the worse."""
    return [{**row, "chosen": " a", "rejected": " b"} for row in short.rows["reward"]]


@pytest.mark.long
def test_stopped_after_the_last_evaluation_it_goes_on_to_the_same_model(short: Any, tmp_path: Path) -> None:
    rows = one_lesson(short)
    given: dict[str, Any] = {
        "inputs": {"train_dataset": rows, "eval_dataset": swapped(rows)},
        "evaluation_steps": 2,
        "metric_for_best_model": "loss",
        "load_best_model_at_end": True,
        "early_stopping_patience": 2,
        "save_total_limit": 1,
    }
    whole, _ = short.train("reward", at="whole", **given)
    with pytest.raises(KeyboardInterrupt):
        short.train("reward", at="again", listeners=(interrupt(4),), save_steps=1, **given)
    assert checkpoints(tmp_path / "again" / "reward") == [0, 3]
    again, later = short.train("reward", at="again", save_steps=1, **given)
    assert later.steps("eval_loss") == [4]
    for path, leaf in whole.items():
        np.testing.assert_array_equal(leaf, again[path], err_msg=path)
