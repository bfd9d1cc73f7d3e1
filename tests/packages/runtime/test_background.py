"""Programs compiled in threads are found by the calls that need them."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest

from rlhf_core.loggers.console import Pace
from rlhf_core.mesh import abstract_rows, make_mesh, put_rows
from rlhf_core.metrics import Max, Mean, Min, Sum
from rlhf_core.runtime import background
from rlhf_core.state import create_state
from rlhf_core.step import Programs


@pytest.fixture
def compiled() -> Any:
    """Names of what is compiled meanwhile."""
    names: list[str] = []

    def note(event: str, seconds: float, **about: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(str(about.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(note)
    yield names
    jax.monitoring.unregister_event_duration_listener(note)


def test_a_call_finds_what_was_compiled_ahead(compiled: list[str]) -> None:
    mesh = make_mesh()

    @jax.jit
    def twice(batch: Any) -> Any:
        return {name: 2 * x for name, x in batch.items()}

    ahead, batch = background.BackgroundCompiler(), {"x": np.arange(8 * 3, dtype=np.float32).reshape(8, 3)}
    ahead.compile("twice", twice.lower(abstract_rows(mesh, batch)))
    ahead.wait("twice")
    ahead.wait("never asked for")
    before = len(compiled)
    assert before == 1
    np.testing.assert_array_equal(twice(put_rows(mesh, batch))["x"], 2 * batch["x"])
    assert len(compiled) == before


def test_programs_that_take_long_are_said_and_leave_no_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(background, "PATIENCE", 0.01)
    background._say_that_it_takes_long.cache_clear()
    (tmp_path / "plan.json").write_text('{"updates": 1000}')
    pace, finish = Pace(tmp_path / "plan.json"), threading.Event()
    pace.mark(1)
    pace.mark(2)
    assert pace.seconds_left() is not None
    ahead = background.BackgroundCompiler()
    ahead.compile("slow", SimpleNamespace(compile=finish.wait))
    assert background.compiling()
    assert pace.seconds_left() is None
    threading.Timer(0.1, finish.set).start()
    ahead.wait("slow")
    assert not background.compiling()
    assert pace.seconds_left() is not None
    assert capsys.readouterr().err.startswith("still compiling after 0 s: programs of large models")


def test_what_the_compiler_raises_reaches_the_caller() -> None:
    def fails() -> None:
        raise MemoryError("no room for the program")

    ahead = background.BackgroundCompiler()
    ahead.compile("large", SimpleNamespace(compile=fails))
    with pytest.raises(MemoryError, match="no room"):
        ahead.wait("large")
    with pytest.raises(MemoryError, match="no room"):
        ahead.wait_for_all()


@pytest.mark.parametrize("from_zero", [False, True])
def test_an_update_compiles_nothing_that_was_compiled_ahead(
    compiled: list[str], tiny: Any, from_zero: bool
) -> None:
    """One micro-batch or several, and `apply`, which could not run without moving the state. From zero there is one
    program for both, and the sums are the same bits."""
    state = create_state(tiny.make_model(), optax.adamw(1e-2), seed=3)
    batches = [{"x": np.full((8, 4), float(i), np.float32)} for i in (1, 2)]

    def objective(params: Any, batch: Any) -> tuple[Mean, dict[str, Any]]:
        scale = jax.tree.leaves(params)[0].mean()
        x = batch["x"]
        kinds = {"seen": Mean, "most": Max, "least": Min, "all": Sum}
        return Mean.of(scale * x), {name: kind.of(x) for name, kind in kinds.items()}

    mesh, programs = state.step.sharding.mesh, Programs(objective, state, from_zero=from_zero)
    programs.compile(state, [(batches[0], False)])
    programs.compile(state, [(batches[0], False), (batches[0], True)])
    programs.wait()
    named = [name for name in compiled if "accumulate" in name or "apply" in name]
    assert len(named) == (2 if from_zero else 3), compiled
    placed = [put_rows(mesh, batch) for batch in batches]
    jax.block_until_ready((placed, state.params))
    before = len(compiled)
    done = programs.accumulate(state, placed[1], programs.accumulate(state, placed[0], None))
    # The sums over no micro-batch are small, and compiled by the first update.
    assert all("zeros" in name for name in compiled[before:]), compiled[before:]
    plain = Programs(objective, state)
    expected = plain.accumulate(state, placed[1], plain.accumulate(state, placed[0], None))
    for found, wanted in zip(jax.tree.leaves(done), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(found, wanted)
    before = len(compiled)
    following, metrics = programs.apply(state, done)
    jax.block_until_ready(following.params)
    assert len(compiled) == before
    read = {name: float(metric.result()) for name, metric in metrics.items()}
    assert (read["seen"], read["most"], read["least"], read["all"]) == pytest.approx((1.5, 2, 1, 96))
    assert np.isfinite(read["grad_norm"])
