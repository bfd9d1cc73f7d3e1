"""A trainer that is run from Python goes on with the same experiment, and refuses another in its directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlhf_core import data
from rlhf_core.errors import InputError
from tests.shared.interrupts import At, interrupt

BASE: dict[str, Any] = {
    "learning_rate": 1e-2,
    "total_batch_size": 4,
    "max_training_steps": 3,
    "save_steps": 1,
    "log_steps": 1,
    "progress_bar_type": "json",
}
TRAINERS = [
    "sft",
    *(pytest.param(name, marks=pytest.mark.long) for name in ("dpo", "grpo")),
    pytest.param("reward", marks=pytest.mark.exhaustive),
]


def brief(completions: list[str]) -> list[float]:
    return [-float(len(text)) for text in completions]


def long(completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions]


class Run:
    """One trainer class with its data, in one directory."""

    def __init__(self, name: str, tiny: ModuleType, directory: Path) -> None:
        import importlib

        module = importlib.import_module(f"rlhf_{name}")
        classes = {"sft": "SFT", "reward": "Reward", "dpo": "DPO", "grpo": "GRPO"}
        self.trainer = getattr(module, f"{classes[name]}Trainer")
        config = getattr(module, f"{classes[name]}Config")
        more = {"num_generations": 4, "max_completion_length": 4} if name == "grpo" else {}
        self.config = config(**BASE, **more, save_directory=directory)
        rows = {"sft": tiny.texts, "grpo": tiny.prompts}.get(name, tiny.pairs)
        self.inputs = {"model": tiny.make_model(scale=2.0), "train_dataset": rows(6)}
        if name == "grpo":
            self.inputs["rewards"] = [brief]
        self.directory = directory

    def train(self, changes: dict[str, Any] | None = None, **inputs: Any) -> Any:
        return self.trainer(self.config.replace(**(changes or {})), **{**self.inputs, **inputs}).train()


@pytest.fixture(autouse=True, scope="module")
def _one_device(tiny: ModuleType) -> Iterator[None]:
    """Whose programs take less time to compile."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("rlhf_core.stage.alone.make_mesh", tiny.one_device)
        yield


@pytest.fixture(scope="module")
def finished(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """{trainer: its run, done} by name."""
    runs: dict[str, Run] = {}

    def get(name: str) -> Run:
        if name not in runs:
            runs[name] = Run(name, tiny, tmp_path_factory.mktemp(name))
            runs[name].train()
        return runs[name]

    return get


def kept(directory: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name not in (".lock", "events.jsonl")
    }


@pytest.mark.parametrize("name", TRAINERS)
def test_another_experiment_is_refused_and_changes_nothing(
    name: str, finished: Any, tiny: ModuleType
) -> None:
    run = finished(name)
    before = kept(run.directory)
    other_model = tiny.make_model(scale=2.0, seed=5)
    rows = [*run.inputs["train_dataset"][:-1], run.inputs["train_dataset"][0]]
    changed = [
        ("learning_rate: then 0.01, now 0.02", {"learning_rate": 2e-2}, {}),
        ("seed: then 0, now 1", {"seed": 1}, {}),
        ("model: the contents of the Model given from Python have changed", {}, {"model": other_model}),
        ("train_data: the contents of the list given from Python", {}, {"train_dataset": rows}),
    ]
    if name == "grpo":
        changed.append((r"rewards\[0\]: then \"brief\", now \"long\"", {}, {"rewards": [long]}))
        changed.append((r"loss.name: then \"dapo\", now \"cispo\"", {"loss_type": "cispo"}, {}))
    for said, config, inputs in changed:
        with pytest.raises(InputError, match=said) as caught:
            run.train(config, **inputs)
        assert "use another save_directory" in str(caught.value)
    assert kept(run.directory) == before


@pytest.mark.parametrize("name", TRAINERS)
def test_the_same_experiment_gives_what_it_left(
    name: str, finished: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished(name)
    before = kept(run.directory)
    capsys.readouterr()
    again = run.train({"progress_bar_type": "tqdm"})
    assert "nothing is trained: the result is what" in capsys.readouterr().err
    assert again.artifact.path == run.directory / "artifacts" / "model"
    last = json.loads((run.directory / "metrics.jsonl").read_text().splitlines()[-1])
    assert again.metrics["loss"] == last["loss"]
    assert kept(run.directory) == before


@pytest.mark.parametrize("name", TRAINERS)
def test_a_checkpoint_names_its_experiment_where_the_record_is_gone(
    name: str, finished: Any, tmp_path: Path
) -> None:
    run = finished(name)
    shutil.copytree(run.directory / "checkpoints", tmp_path / "checkpoints")
    shutil.rmtree(tmp_path / "checkpoints" / "3", ignore_errors=True)
    before = kept(tmp_path)
    with pytest.raises(
        InputError, match=r"learning_rate: then 0.01, now 0.02\n.*was begun with other settings"
    ):
        run.train({"learning_rate": 2e-2, "save_directory": tmp_path})
    assert kept(tmp_path).keys() >= before.keys()
    assert not (tmp_path / "stage.json").exists() or "running" in (tmp_path / "stage.json").read_text()
    rows = [{**row, "prompt": "z " + row["prompt"]} for row in run.inputs["train_dataset"]]
    with pytest.raises(
        InputError, match=r"train_data: the contents of the list given from Python have changed"
    ):
        run.train({"save_directory": tmp_path}, train_dataset=rows)
    assert run.train({"save_directory": tmp_path}).metrics["loss"]


def test_two_trainers_do_not_share_a_directory(finished: Any, tmp_path: Path) -> None:
    run = finished("sft")

    def again() -> None:
        with pytest.raises(InputError, match=r"^save_directory: .* is in use by another run"):
            run.train({"save_directory": tmp_path})
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.train({"save_directory": tmp_path}, callbacks=[At(1, again)])


def test_data_that_were_mended_are_accepted_while_they_are_as_many(finished: Any, tmp_path: Path) -> None:
    run = finished("sft")
    rows = run.inputs["train_dataset"]
    drawn = set(data.visited_rows(len(rows), 4, seed=0).tolist())
    late = min(set(range(len(rows))) - drawn)
    mended = [{**row, "completion": " q r"} if i == late else row for i, row in enumerate(rows)]
    with pytest.raises(KeyboardInterrupt):
        run.train({"save_directory": tmp_path / "run"}, callbacks=[interrupt(2)])
    with pytest.raises(InputError, match=r"train_data: the contents .*accept=\[\"train_data\"\]"):
        run.train({"save_directory": tmp_path / "run"}, train_dataset=mended)
    with pytest.raises(InputError, match=r"train_data: it had 6 rows for training and has 5 now"):
        run.train({"save_directory": tmp_path / "run"}, train_dataset=rows[:-1], accept=["train_data"])
    # What was refused has not changed the record: the run continues with what it had.
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    again = run.train({"save_directory": tmp_path / "again"})
    assert again.metrics["loss"] == pytest.approx(run.train().metrics["loss"], rel=1e-6)
    with pytest.warns(UserWarning, match=r"continues after update 1 with what was accepted: train_data"):
        result = run.train({"save_directory": tmp_path / "run"}, train_dataset=mended, accept=["train_data"])
    fresh = run.train({"save_directory": tmp_path / "fresh"}, train_dataset=mended)
    assert result.metrics["loss"] == pytest.approx(fresh.metrics["loss"], rel=1e-6)
    assert result.metrics["loss"] != again.metrics["loss"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param({"max_training_steps": 2}, {"max_training_steps": 4}, id="updates"),
        pytest.param(
            {"max_training_steps": None, "num_train_epochs": 1},
            {"max_training_steps": None, "num_train_epochs": 2},
            id="epochs",
        ),
    ],
)
def test_a_finished_run_of_grpo_is_extended(
    before: dict[str, Any], after: dict[str, Any], tiny: ModuleType, tmp_path: Path
) -> None:
    """Its rollouts are those of a run that was as long from the beginning, extended by epochs or by updates."""
    run = Run("grpo", tiny, tmp_path / "run")
    run.train(before)
    longer, whole = run.train(after), run.train({**after, "save_directory": tmp_path / "whole"})
    steps = [row["step"] for row in tiny.read_rows(tmp_path / "run" / "metrics.jsonl")]
    assert steps == [row["step"] for row in tiny.read_rows(tmp_path / "whole" / "metrics.jsonl")]
    assert len(steps) > 2
    for name in ("reward", "loss", "completions/mean_length"):
        assert longer.metrics[name] == pytest.approx(whole.metrics[name], rel=1e-5, abs=1e-6)


def test_a_finished_run_is_extended_where_its_schedule_allows_it(
    finished: Any, tiny: ModuleType, tmp_path: Path
) -> None:
    run = Run("sft", tiny, tmp_path / "run")
    shutil.copytree(finished("sft").directory, run.directory)
    with pytest.raises(
        InputError, match=r"max_training_steps: then 3, now 2: the stage has made its 3 updates"
    ):
        run.train({"max_training_steps": 2})
    longer = run.train({"max_training_steps": 5})
    steps = [json.loads(line)["step"] for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5]
    whole = run.train({"max_training_steps": 5, "save_directory": tmp_path / "whole"})
    assert longer.metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=1e-5)
    falling = {"scheduler": "linear", "save_directory": tmp_path / "falling"}
    run.train(falling)
    with pytest.raises(InputError, match=r'scheduler = "linear" spreads the decay over the whole run'):
        run.train({**falling, "max_training_steps": 5})
    (tmp_path / "falling" / "stage.json").unlink()  # the checkpoint tells too
    with pytest.raises(InputError, match=r'scheduler = "linear" spreads the decay'):
        run.train({**falling, "max_training_steps": 5})


@pytest.mark.long
def test_a_reward_that_was_fixed_continues_where_it_is_accepted(finished: Any, tmp_path: Path) -> None:
    run = finished("grpo")
    with pytest.raises(KeyboardInterrupt):
        run.train({"save_directory": tmp_path}, callbacks=[interrupt(2)])

    def fixed(completions: list[str]) -> list[float]:
        return [1.0 + len(text) for text in completions]

    fixed.__name__ = "brief"
    with pytest.raises(
        InputError, match=r"the code of 'brief' has changed since; .*accept=\[\"rewards.brief\"\]"
    ):
        run.train({"save_directory": tmp_path}, rewards=[fixed])
    with pytest.warns(
        UserWarning, match=r"'grpo' continues after update 1 with what was accepted: rewards\[0\]"
    ):
        result = run.train({"save_directory": tmp_path}, rewards=[fixed], accept=["rewards.brief"])
    assert result.metrics["reward"] > 0 > run.train().metrics["reward"]
    accepted = json.loads((tmp_path / "stage.json").read_text())["accepted"]
    assert [(each["field"], each["after_update"]) for each in accepted] == [("rewards[0]", 1)]
    assert (
        run.train({"save_directory": tmp_path}, rewards=[fixed]).metrics["reward"] == result.metrics["reward"]
    )
