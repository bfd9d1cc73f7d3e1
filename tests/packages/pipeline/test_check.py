"""`plan` and `rlhf check`: paths, --set, and what is forecast."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlhf_core.contracts import Forecast
from tests.shared import pipelines


def test_whose_paths_are_relative_to_what(
    fake: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pipelines").mkdir()
    (tmp_path / "here").mkdir()
    for place in ("pipelines", "here"):
        (tmp_path / place / "train.jsonl").write_text("{}")
        (tmp_path / place / "model").mkdir()
    file = tmp_path / "pipelines" / "p.toml"
    file.write_text(
        'dir = "runs/x"\n[[stage]]\nname = "a"\ntrainer = "fake"\n'
        'train_data = ["train.jsonl", { name = "jsonl", path = "train.jsonl" }]\n'
        'model = "model"\neval_data = "org/dataset"\n'
    )
    monkeypatch.chdir(tmp_path / "here")
    plain = pipelines.read(file)
    options = plain.stages[0]
    beside = str(tmp_path / "pipelines" / "train.jsonl")
    assert options["train_data"] == [beside, {"name": "jsonl", "path": beside}]
    assert options["model"] == str(tmp_path / "pipelines" / "model")
    assert options["eval_data"] == "org/dataset"
    assert plain.dir == tmp_path / "here" / "runs" / "x"
    changed = pipelines.read(file, sets=["a.train_data=train.jsonl", "a.model=model", "dir=y"])
    assert changed.stages[0]["train_data"] == str(tmp_path / "here" / "train.jsonl")
    assert changed.stages[0]["model"] == str(tmp_path / "here" / "model")
    assert changed.dir == tmp_path / "here" / "y"
    assert pipelines.read(file, dir="z").dir == tmp_path / "here" / "z"


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("a.size=5", "size", 5),
        ("a.learning_rate=1e-3", "learning_rate", 1e-3),
        ("a.loss.temperature=2.0", "loss", {"name": "fake_loss", "temperature": 2.0}),
        ("a.rewards[0].weight=2.5", "rewards", [{"name": "length", "weight": 2.5}, "exact_match"]),
        ("a.rewards[1].weight=2.5", "rewards", [{"name": "length"}, {"name": "exact_match", "weight": 2.5}]),
        ("a.rewards.1.weight=2", "rewards", [{"name": "length"}, {"name": "exact_match", "weight": 2}]),
        ("a.fail=x=y", "fail", "x=y"),
        ("a.max_training_steps=none", "max_training_steps", None),
    ],
)
def test_set(fake: ModuleType, text: str, key: str, value: Any) -> None:
    Path("p.toml").write_text(
        'dir = "x"\n[[stage]]\nname = "a"\ntrainer = "fake"\nloss = "fake_loss"\n'
        'rewards = [{ name = "length" }, "exact_match"]'
    )
    file = pipelines.read("p.toml", sets=[text, "seed=5", "mesh.fsdp=2"])
    assert not file.problems
    assert file.stages[0][key] == value
    assert (file.seed, file.mesh) == (5, {"fsdp": 2})


def test_previews_see_the_model_that_is_still_to_be_made(pipeline: Path, fake: ModuleType) -> None:
    planned, _ = pipelines.planned(pipeline, objects=[fake])
    lines = pipelines.forecasts(pipeline, objects=[fake])
    assert lines["policy"] == Forecast(("3 bytes from {'model_type': 'llama'}",))
    assert planned.stages[2].config.model == str(Path("runs/a/base/artifacts/model").absolute())
    assert planned.stages[2].written.model == "base.model"
    assert planned.stages[2].config.rewards[0].options["model"].endswith("runs/a/rm/artifacts/model")


def test_what_only_the_hub_can_have_is_said(pipeline: Path, fake: ModuleType) -> None:
    """A directory beside it suggests that the name was misspelt."""
    Path("tokenizer").mkdir()
    sets = ['base.model={model_type="llama", tokenizer="tokeniser"}', 'policy.model="nobody/none"']
    lines = pipelines.forecasts(pipeline, *sets, objects=[fake])
    said = "is not a directory here: the stage looks it up on the hub when it begins."
    assert lines["base"].lines[-1] == f"model.tokenizer 'tokeniser' {said} Did you mean 'tokenizer'?"
    assert lines["policy"].lines[-1] == f"model 'nobody/none' {said}"
    assert len(lines["rm"].lines) == 1


def test_a_forecast_that_fails_is_reported_with_its_plugin_and_place(
    pipeline: Path, fake: ModuleType, rlhf: Callable[..., Any]
) -> None:
    source = Path(str(fake.__file__))
    line = next(n for n, text in enumerate(source.read_text().splitlines(), 1) if "json.loads" in text)
    plugin = ["--plugin", str(source), "--dir", "runs/a"]
    for command in ("check", "run"):
        sets = ["--set", "base.fail=broken forecast", "--set", "policy.fail=forecast"]
        ended = rlhf(command, "p.toml", *plugin, *sets)
        assert ended.code == 2
        assert ended.message.splitlines() == [
            f"stage 'base'.trainer: 'fake' (from {source}) failed to forecast: it raised JSONDecodeError: "
            f"Expecting property name enclosed in double quotes: line 1 column 2 (char 1) ({source} line {line})",
            "stage 'policy': train.jsonl row 7: no column 'text'",
        ]


def test_a_full_disk_is_not_the_forecasts_fault(
    pipeline: Path, fake: ModuleType, rlhf: Callable[..., Any]
) -> None:
    source = str(fake.__file__)
    ended = rlhf("check", "p.toml", "--plugin", source, "--dir", "runs/a", "--set", "rm.fail=full forecast")
    assert ended.code == 1
    assert ended.message.startswith("no space left on the disk while writing cache")


def test_what_is_dropped_of_eval_data_is_reported_too(tiny: ModuleType, tmp_path: Path) -> None:
    tiny.make_model("lm").save(tmp_path / "model")
    tiny.write_rows(
        tmp_path / "texts.jsonl", [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "c"}]
    )
    tiny.write_rows(
        tmp_path / "held.jsonl", [{"prompt": "a", "completion": "b"}, {"prompt": "", "completion": " "}]
    )
    stages = [f'name = "{name}"\ntrainer = "{name}"\n' for name in ("sft", "grpo")]
    stages[1] += 'rewards = ["length"]\n'
    data = 'model = "model"\ntrain_data = "texts.jsonl"\neval_data = "held.jsonl"\n'
    path = tmp_path / "p.toml"
    path.write_text("".join(f"[[stage]]\n{stage}{data}" for stage in stages))
    lines = pipelines.forecasts(path)
    for name in ("sft", "grpo"):
        _, held_out, *_ = lines[name].lines
        assert re.match(
            r"eval_data: 2 .*: 1 kept, 1 empty dropped \(held.jsonl row 2\).*; rlhf data .*held.jsonl --model",
            held_out,
        )
        # The stage does not warn of it again.
        assert held_out in lines[name].told


WEIGHTED = """
from dataclasses import dataclass
from rlhf_core import PAIRWISE_LOSS, hookimpl

@dataclass(frozen=True)
class Weighted:
    weights: tuple[float, ...] = ()
    floor: float | None = None
    scale: float = 0.5

    def __call__(self, inputs): ...

@hookimpl
def rlhf_register(registry):
    registry.add(PAIRWISE_LOSS, "weighted", Weighted)
"""


def test_a_plan_says_what_is_learned_with_also_where_the_file_does_not(
    pipeline: Path, fake: ModuleType, rlhf: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the epochs where updates are given, an optimizer's weight_decay, or defaults that are no number or text."""
    monkeypatch.setenv("COLUMNS", "1000")
    Path("weighted.py").write_text(WEIGHTED)
    sets = (
        "base.max_training_steps=0",
        "base.loss=weighted",
        "rm.learning_rate=0.001",
        "rm.max_training_steps=9",
    )
    given = [word for each in (*sets, "policy.loss={ temperature = 2.0 }") for word in ("--set", each)]
    plugin = ("--plugin", str(fake.__file__), "--plugin", "weighted.py")
    shown = [
        line.strip() for line in rlhf("check", "p.toml", "--dir", "runs/a", *plugin, *given).out.splitlines()
    ]
    adamw = "by default: optimizer adamw (b1 0.9, b2 0.999, eps 1e-08, mu_dtype float32)"
    for line in (
        "loss weighted (scale 0.5); max_training_steps 0",
        "learning_rate 0.001; max_training_steps 9",
        f"{adamw}; loss fake_loss (temperature 1); scheduler constant; weight_decay 0.01; max_grad_norm 1",
        "loss fake_loss (temperature 2); rewards fake_model",
        f"{adamw}; learning_rate 5e-05; scheduler constant; num_train_epochs 10; weight_decay 0.01; max_grad_norm 1",
    ):
        assert line in shown
