"""The two openers: what a build is given on devices, and what before its stage begins."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from rlhf_core import Forecast, Stage, TrainerConfig, plugins
from rlhf_core.mesh import make_mesh
from rlhf_core.training import Context, OnDevices, OnShapes
from tests.walk.source import imports, product, reach

ROOT = Path(__file__).parents[3]
CONFIG = TrainerConfig(model="m", train_data="rows.jsonl")


def stage_on(mesh: Any, directory: Path) -> Stage:
    host = plugins.load()
    return Stage("s", directory, 0, mesh, True, host.registry, host.hook)


def test_a_build_cannot_tell_them_apart() -> None:
    names = [name for name, each in vars(Context).items() if inspect.isfunction(each)]
    for name in names:
        if name.startswith("_"):
            continue
        on_devices, on_shapes = getattr(OnDevices, name), getattr(OnShapes, name)
        assert inspect.signature(on_devices) == inspect.signature(on_shapes), name


def test_each_calls_what_is_its_own(tmp_path: Path) -> None:
    on_devices = OnDevices(CONFIG, stage_on(make_mesh(), tmp_path))
    on_shapes = OnShapes(CONFIG, stage_on(None, tmp_path))
    described = OnShapes(CONFIG, stage_on(make_mesh(), tmp_path))
    openers = (on_devices, on_shapes, described)
    assert [each.compute(len, "ab", otherwise=0) for each in openers] == [2, 0, 0]
    assert [each.on_mesh(list, otherwise=None) for each in openers] == [[], None, []]
    for each in openers:
        each.check(Forecast, ("a line",), ("a warning",))
        each.check(len, "no forecast")
    assert (on_shapes.later, on_shapes.warnings) == (["a line"], ["a warning"])
    on_shapes.by(CONFIG.replace(learning_rate=1.0)).warn("first", first=True)
    assert on_shapes.warnings == ["first", "a warning"]


def test_a_check_ends_where_there_is_no_tokenizer(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n')
    reached = []

    def build(config: Any, context: Context) -> Any:
        context.texts("train_data")
        reached.append("the end")

    context = OnShapes(CONFIG.replace(train_data=str(rows)), stage_on(None, tmp_path))
    assert context.build(build) is None
    assert not reached
    ((source, _),) = context.sources
    assert source.describe(context, []).lines[0] == "1 demonstration before length limits"


def test_training_reaches_no_rewards_and_no_sampler() -> None:
    """What `rlhf_core.training` imports at once every trainer has, also one of given texts."""
    modules = product(ROOT)
    graph = {name: set(imports(module, modules)) for name, module in modules.items()}
    rooms = {name.split(".")[1] for name in reach("rlhf_core.training", graph) if "." in name}
    assert "fit" in rooms
    assert not rooms & {"rewards", "sampling", "rollouts", "environments", "scoring", "pipeline"}
