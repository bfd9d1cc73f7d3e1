"""`rlhf check --on DEVICES --suggest`: its arithmetic by hand, what it ranks first, and what it compiles."""

from __future__ import annotations

import json
import os
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
from rlhf_topologies import chips, description, interpreters, pass_memory
from rlhf_topologies.compile import describe
from rlhf_topologies.suggest import (
    COMPILED,
    STEPS,
    Candidate,
    Search,
    StageForecast,
    meshes,
    more_steps,
    suggest,
)
from rlhf_topologies.verdicts import judge_stage

from rlhf_core import cli
from rlhf_core.mesh import make_mesh, with_shardings
from rlhf_core.models import attend_blocks
from tests.shared import pipelines
from tests.shared.topologies import GB, ONE, SIZES, job, model


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))


def here(topology: chips.Topology) -> list[Any]:
    """This machine's devices in place of a topology's."""
    return jax.devices()[: topology.count]


def with_memory(monkeypatch: pytest.MonkeyPatch, memory: int) -> None:
    """Give an H100 so many bytes that arrays may take."""
    monkeypatch.setitem(chips.CHIPS, "h100", replace(chips.CHIPS["h100"], memory=round(memory / 0.9) + 2))


def test_a_mesh_with_experts_is_suggested_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of `fsdp`, with sizes that divide the experts; never for a model without any."""

    def best(**sizes: Any) -> Candidate:
        wide = model("none", hidden_size=2048, intermediate_size=4096, **sizes)
        shape = description.ProgramShape(wide, 640, 512, memory=GB)
        programs = description.StagePrograms(
            (description.Program("accumulate", lambda: None, "train", 1, shape=shape),)
        )
        search = Search(job("h100:8"), here)
        monkeypatch.setattr(search, "_describe", lambda *_: {"base": (1, programs)})
        return search.candidates(chips.parse("h100:8"))[0]

    found = best(model_type="mixtral", num_local_experts=256, num_experts_per_tok=1)
    assert found.mesh["expert"] in (4, 8)
    assert f"mesh.expert={found.mesh['expert']}" in found.sets
    assert "expert" not in best().mesh


def test_rows_that_do_not_fit_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """`context` is suggested where a device cannot compute a row, and nowhere else."""
    monkeypatch.setattr("rlhf_topologies.suggest.meshes", lambda _: [{"data": 1, "fsdp": 2, "tensor": 1}])
    wide = model("full", hidden_size=2048, intermediate_size=4096).computing(attention=attend_blocks)

    def best(time: int) -> Candidate:
        def described(_: Any, mesh: dict[str, int], *__: Any) -> Any:
            shape = description.ProgramShape(wide, mesh["fsdp"], time)  # a row for each device, or for two
            programs = (description.Program("accumulate", lambda: None, "train", 1, shape=shape),)
            return {"base": (1, description.StagePrograms(programs))}

        search = Search(job("h100:2"), here)
        monkeypatch.setattr(search, "_describe", described)
        return search.candidates(chips.parse("h100:2"))[0]

    cut = best(2**20)
    assert cut.fits
    assert cut.mesh == {"data": 1, "fsdp": 1, "tensor": 1, "context": 2}
    assert "context" not in best(4096).mesh


def test_state_and_gradients_by_hand(place: Any) -> None:
    """float32: parameters and AdamW's moments stay, gradients lie beside them while they are applied."""
    search = Search(job("h100:4"), here)
    mesh = {"data": 1, "fsdp": 4, "tensor": 1}
    definition = model("none")
    spread = with_shardings(
        definition.abstract_params(), definition.shardings(make_mesh(1, 4, 1, devices=jax.devices()[:4]))
    )
    size = sum(4 * x.size // (1 if x.sharding.is_fully_replicated else 4) for x in jax.tree.leaves(spread))
    described = description.StagePrograms(
        (
            description.Program(
                "accumulate", lambda: None, "train", shape=description.ProgramShape(definition, 8, 32)
            ),
            description.Program("apply", lambda: None, "update"),
        ),
        {"parameters": spread, "optimizer": (spread, spread)},
    )
    forecast = search.forecast(described, chips.parse("h100:4"), mesh, None)
    assert forecast.held == 3 * size
    assert forecast.peaks["apply"] == forecast.floor == 4 * size
    assert forecast.peaks["accumulate"] == 4 * size + pass_memory.pass_bytes(
        definition, (8, 32), mesh, trains=True
    )
    search.corrections["train"] = 2.0
    again = search.forecast(described, chips.parse("h100:4"), mesh, None)
    assert again.rows - again.held == pytest.approx(2 * (forecast.rows - forecast.held), abs=1)


def test_meshes() -> None:
    assert [tuple(mesh.values()) for mesh in meshes(chips.parse("h100:4"))] == [
        (1, 4, 1), (2, 2, 1), (4, 1, 1), (1, 2, 2), (2, 1, 2), (1, 1, 4),
    ]  # fmt: skip
    assert {mesh["tensor"] for mesh in meshes(chips.parse("h100:4x2"))} == {1, 2}


def test_more_micro_batches_only_where_a_device_has_rows_to_spare() -> None:
    def programs(rows: int, calls: float) -> list[description.Program]:
        return [
            description.Program(
                "accumulate", lambda: None, "train", calls, shape=description.ProgramShape(None, rows, 128)
            )
        ]

    mesh = {"data": 1, "fsdp": 4, "tensor": 2}
    assert more_steps(programs(4, 8.0), 1, mesh) is None
    assert more_steps(programs(8, 1.0), 1, mesh) == 2
    assert more_steps(programs(8, 3.0), 1, mesh) == 6
    assert more_steps([], 1, mesh) is None


def test_the_fastest_that_fits_comes_first() -> None:
    def made(peak: int, seconds: float) -> Candidate:
        stage = StageForecast(GB, {"accumulate": peak}, peak, GB, seconds, False)
        return Candidate(
            chips.parse("h100:2"), {**ONE, "fsdp": 2}, {"base": {"remat": "full"}}, {"base": stage}
        )

    fast, slow, small, large = made(70 * GB, 1.0), made(10 * GB, 2.0), made(80 * GB, 9.0), made(90 * GB, 0.1)
    ordered = sorted([large, slow, small, fast], key=lambda each: each.order)
    assert ordered == [fast, slow, small, large]
    assert fast.sets == ["mesh.data=1", "mesh.fsdp=2", "mesh.tensor=1", 'base.remat="full"']


def test_machines_have_ever_more_devices() -> None:
    assert [topology.name for topology in chips.machines("h100")] == ["h100:1", "h100:2", "h100:4", "h100:8"]
    assert [topology.count for topology in chips.machines("v5e")] == [1, 4, 8]
    assert [topology.name for topology in chips.machines("h200:2x8")] == ["h200:2x8"]


def results(on: str, fits: bool, *programs: dict[str, Any]) -> dict[str, Any]:
    """What a compiler that is not there makes of the stage base, whose programs are like one on micro-batches."""
    memory = {"arguments": 1, "outputs": 1, "aliased": 0, "temporary": 1 if fits else 10**15}
    once = {"products": {}, "bytes": 0.0, "sent": 0.0, "network": 0.0, "collectives": {}, "uncounted": []}
    program = {
        "name": "accumulate 8 × 32",
        "work": "train",
        "calls": 1.0,
        "tokens": 1.0,
        "steps": 0,
        "rows": 8,
        "host": 0.0,
        "beside": 0,
    }
    facts = {**program, "memory": memory, "once": once, "loops": []}
    listed = [{**facts, **changes} for changes in programs or ({},)]
    stage = {"note": None, "resident": {"parameters": 1}, "weights": 1, "programs": listed, "remat": "none"}
    topology, mesh = chips.parse(on), {**ONE, "fsdp": 2}
    return describe(topology, mesh, {}, {"base": judge_stage(stage, topology, mesh)})


def test_the_first_that_fits_ends_the_search(place: Any) -> None:
    asked: list[list[str]] = []

    def compiled(job: Any, *, say: Any) -> dict[str, Any]:
        asked.append([job["on"], *job["sets"]])
        planned, _ = pipelines.planned("base.toml", *job["sets"], dir=None)
        assert planned.stages[0].preview.remat == "none"
        return results(job["on"], True)

    saved: list[dict[str, Any]] = []
    found = suggest(
        job("h100", suggest=600), say=lambda _: None, save=saved.append, find=here, compiled=compiled
    )
    assert asked == [["h100:1", "mesh.data=1", "mesh.fsdp=1", "mesh.tensor=1", 'base.remat="none"']]
    assert found["chosen"]["on"] == "h100:1"
    assert len(found["compiled"]) == 1
    assert saved[0]["compiled"] == [] or saved[0]["lines"]
    pasted = tomllib.loads("\n".join(found["lines"]))
    assert pasted == {"mesh": ONE, "remat": "none"}
    json.dumps(found)


def test_programs_that_did_not_fit_raise_the_estimates_of_their_work() -> None:
    """By the bytes beside the state that the compiler counted, or a little more than there are where it refused."""
    search, topology = Search(job("h100:1"), here), chips.parse("h100:1")
    peaks = {"accumulate": 20 * GB, "apply": 14 * GB, "read": 12 * GB}
    stage = StageForecast(10 * GB, peaks, 20 * GB, 14 * GB, 1.0, False)
    candidate = Candidate(topology, ONE, {}, {"base": stage})
    memory = {"arguments": 0, "outputs": 0, "aliased": 0, "temporary": 110 * GB}
    large = {"name": "accumulate", "memory": memory}
    refused = {"name": "apply", "work": "update", "error": "RESOURCE_EXHAUSTED"}
    fits = {"name": "read", "work": "read", "memory": {**memory, "temporary": 11 * GB}}
    unknown = {**large, "name": "generate", "work": "sample"}
    verdicts = results("h100:1", False, large, refused, fits, unknown)["stages"]
    search.correct(candidate, verdicts)
    least = 1.05 * topology.chip.usable - 10 * GB
    assert search.corrections == {"train": pytest.approx(10), "update": pytest.approx(least / (4 * GB))}
    search.correct(candidate, verdicts)  # the forecast was made with the corrections so far
    assert search.corrections["train"] == pytest.approx(100)


@pytest.mark.parametrize(("memory", "steps", "fits"), [(8, 1, True), (3, 4, True), (0.5, 8, False)])
def test_rows_that_do_not_fit_come_in_more_micro_batches(
    memory: float, steps: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until they fit, not beyond, and only as long as there are rows to spare. A row takes 1 GB."""
    definition = model()

    def describe(topology: Any, mesh: Any, settings: Any) -> Any:
        steps = settings.get("base", {}).get(STEPS, 1)
        shape = description.ProgramShape(definition, 8 // steps, 32, memory=8 * GB // steps)
        accumulate = description.Program("accumulate", lambda: None, "train", steps, shape=shape)
        return {"base": (steps, description.StagePrograms((accumulate,)))}

    with_memory(monkeypatch, round(memory * GB))
    search = Search(job("h100:1"), here)
    monkeypatch.setattr(search, "_describe", describe)
    best = search.candidate(chips.parse("h100:1"), ONE)
    assert best.settings["base"].get(STEPS, 1) == steps
    assert best.fits == fits


@pytest.mark.long
def test_at_most_three_are_compiled_and_each_corrects_the_arithmetic(place: Any) -> None:
    """The compiler counts 40 GB more for the larger program than there is; later candidates are estimated by that."""
    saved: list[dict[str, Any]] = []
    asked: list[list[str]] = []

    def compiled(job: Any, *, say: Any) -> dict[str, Any]:
        asked.append(job["sets"])
        best = next(each for each in saved[-1]["ranked"] if each["fits"])
        assert set(job["sets"]) >= {f"mesh.{axis}={size}" for axis, size in best["mesh"].items()}
        program = {"name": next(iter(best["stages"]["base"]["programs"]))}
        return results(job["on"], False, program)

    found = suggest(
        job("h100:8", suggest=600), say=lambda _: None, save=saved.append, find=here, compiled=compiled
    )
    assert 1 <= len(asked) <= COMPILED
    assert len({tuple(sets) for sets in asked}) == len(asked) == len(found["compiled"])
    assert found["chosen"] is None
    assert found["lines"] == []
    if len(asked) < COMPILED:
        assert not any(each["fits"] for each in found["ranked"])


@pytest.mark.long
def test_less_memory_takes_more_devices_and_then_remat(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of 16 bytes per parameter sets how many devices there must be."""
    table = ", ".join(f"{key} = {json.dumps(value)}" for key, value in {**SIZES, "hidden_size": 512}.items())
    place.settings(
        "base.toml", f'model = {{ {table}, tokenizer = "model" }}'.replace("vocab_size = 320, ", "")
    )
    search = Search(job("h100:1"), here)
    alone = search.candidate(chips.parse("h100:1"), ONE)
    state = alone.stages["base"].held
    with_memory(monkeypatch, round(1.1 * state))
    tried: list[str] = []

    def compiled(job: Any, *, say: Any) -> dict[str, Any]:
        tried.append(job["on"])
        return results(job["on"], True)

    found = suggest(job("h100", suggest=600), say=lambda _: None, find=here, compiled=compiled)
    assert tried == ["h100:2"]
    assert found["chosen"]["mesh"]["data"] == 1
    assert found["chosen"]["peak"] <= 1.1 * state
    assert [each["fits"] for each in found["ranked"] if each["on"] == "h100:1"] == [False]


def test_time_that_is_up_leaves_what_arithmetic_found(place: Any) -> None:
    def compiled(job: Any, *, say: Any) -> dict[str, Any]:
        raise AssertionError

    late = job("h100:1", suggest=-1)
    found = suggest(late, say=lambda _: None, find=here, compiled=compiled)
    assert found["lines"]
    assert found["chosen"] is None
    assert found["compiled"] == []


def test_a_sampling_mesh_is_written_with_the_rest_of_its_table(place: Any) -> None:
    search = Search(job("h100:2", "policy.toml"), here)
    first = search.candidate(chips.parse("h100:2"), {**ONE, "fsdp": 2})
    assert first.stages["policy"].samples
    settings = {"policy": {**first.settings["policy"], "sampling.mesh.tensor": 2}}
    changed = search.candidate(chips.parse("h100:2"), {**ONE, "fsdp": 2}, settings)
    pasted = tomllib.loads("\n".join(changed.lines(search.file())))
    assert pasted["sampling"] == {"max_completion_length": 4, "mesh": {"tensor": 2}}
    assert "policy.sampling.mesh.tensor=2" in changed.sets


def found_by(chosen: bool, place: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Let the other environment return what a compiler that is not there makes of the best candidate."""

    def compiled(job: Any, *, say: Any) -> dict[str, Any]:
        return results(job["on"], chosen)

    found = suggest(job("h100:1", suggest=600), say=lambda _: None, find=here, compiled=compiled)
    monkeypatch.setattr(interpreters, "find", lambda topology: Path("python"))
    monkeypatch.setattr(interpreters, "run", lambda python, job, *, seconds: found)
    return found


def test_what_is_printed(place: Any, rlhf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without weights is enough: the command reads its config before the other environment does."""
    for file in (place.path / "model").glob("*.safetensors"):
        file.unlink()
    found_by(True, place, monkeypatch)
    ended = rlhf("check", "base.toml", "--on", "h100:1", "--suggest")
    assert ended.code == cli.DONE, ended.message
    for words in (
        "by arithmetic, on h100:1",
        "these fit h100:1; for the pipeline:",
        "# stage base",
        "kernels of rlhf-kernels",
    ):
        assert words in ended.out
    assert "mesh = { data = 1, fsdp = 1, tensor = 1 }" in ended.out
    ended = rlhf("check", "base.toml", "--on", "h100:1", "--suggest", "--json")
    printed = json.loads(ended.out)
    assert printed["chosen"]["mesh"] == ONE
    assert printed["compiled"][0]["stages"]["base"]["fits"]


def test_where_nothing_fits_why(place: Any, rlhf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found_by(False, place, monkeypatch)
    ended = rlhf("check", "base.toml", "--on", "h100:1", "--suggest")
    assert ended.code == cli.BAD_INPUT
    assert (
        "--on h100:1: none of the 1 that were compiled fits; in the last one, stage 'base' does not fit"
        in ended.message
    )
    with_memory(monkeypatch, 1000)
    found_by(False, place, monkeypatch)
    ended = rlhf("check", "base.toml", "--on", "h100:1", "--suggest")
    assert ended.code == cli.BAD_INPUT
    assert "--on h100:1: nothing fits" in ended.message
    assert "stage 'base' keeps" in ended.message


@pytest.mark.accelerators
def test_the_real_compiler(place: Any, rlhf: Any) -> None:
    if not os.environ.get("RLHF_GPU_PYTHON"):
        pytest.skip("set RLHF_GPU_PYTHON, or run make test-accelerators, which installs it")
    ended = rlhf("check", "base.toml", "--on", "h100", "--suggest", "--json")
    assert ended.code == cli.DONE, ended.message
    found = json.loads(ended.out)
    assert found["chosen"]["on"] == "h100:1"
    (compiled,) = found["compiled"]
    for name, stage in compiled["stages"].items():
        forecast = compiled["candidate"]["stages"][name]
        assert forecast["resident"] == pytest.approx(sum(stage["resident"].values()), rel=0.1)
