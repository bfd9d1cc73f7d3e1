"""What is said of programs: how fast they are at most, whether they fit, and what to change."""

from __future__ import annotations

from typing import Any

import pytest
from rlhf_topologies import check, chips, verdicts

GB = 10**9
MESH = {"data": 1, "fsdp": 8, "tensor": 1}


def counts(bf16: float = 0.0, size: float = 0.0) -> dict[str, Any]:
    none: dict[str, Any] = {"sent": 0.0, "network": 0.0, "collectives": {}, "uncounted": []}
    return {"products": {"bf16": bf16}, "bytes": size, **none}


def program(name: str = "accumulate 8 × 512", work: str = "train", **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "work": work,
        "calls": 2.0,
        "tokens": 4000.0,
        "steps": 0,
        "rows": 16,
        "host": 0.0,
        "beside": 8 * GB,
        "memory": {"arguments": 6 * GB, "outputs": 5 * GB, "aliased": 4 * GB, "temporary": 10 * GB},
        "once": counts(bf16=1e14, size=1e11),
        "loops": [],
        **changes,
    }


def stage(*programs: Any, resident: dict[str, int] | None = None) -> dict[str, Any]:
    held = resident or {"parameters": 4 * GB, "optimizer": 8 * GB}
    return {"note": None, "remat": "auto", "resident": held, "weights": 7 * GB, "programs": list(programs)}


def test_speed_at_most() -> None:
    """Two micro-batches and an update; sampling of 64 steps of 1 ms after 100 ms of prefill.

    The largest program takes 6 + 10 + (5 − 4) + 8 GB.
    """
    chip = chips.CHIPS["h100"]
    step = counts(size=chip.memory_bandwidth * 1e-3)
    made = verdicts.judge_stage(
        stage(
            program(once=counts(bf16=989.4e12)),
            program("apply", "update", calls=1.0, tokens=0.0, once=counts(size=3.35e12)),
            program(
                "generate",
                "sample",
                calls=0.5,
                tokens=1000.0,
                steps=64,
                once=counts(bf16=98.94e12),
                loops=[counts(size=1.0), step],
            ),
        ),
        chips.parse("h100:8"),
        MESH,
    )
    assert made["fits"]
    assert made["training_seconds"] == pytest.approx(2 * 1.0 + 1.0)
    assert made["sampling_seconds"] == pytest.approx(0.5 * (0.1 + 64 * 1e-3))
    assert made["update_seconds"] == pytest.approx(made["training_seconds"] + made["sampling_seconds"])
    peak = 8 * 989.4e12
    assert made["training_mfu"] == pytest.approx(6 * 7 * GB * 8000 / (3.0 * peak))
    assert made["sampling_mfu"] == pytest.approx(2 * 7 * GB * 500 / (made["sampling_seconds"] * peak))
    assert made["programs"][2]["bound"] == "compute"
    shown = "\n".join(check.lines(made))
    assert f"training: at most {8000 / 3:,.0f} tokens/s" in shown
    assert "always in memory: parameters 4.0 GB, optimizer 8.0 GB" in shown
    assert "fits: at most 25.0 GB of 76.5 GB" in shown
    assert check.program_table(made).row_count == 4  # a row for the steps
    # Of two loops the one that moves more.
    assert made["programs"][2]["step"]["bytes"] == step["bytes"]
    largest = made["programs"][0]
    assert largest["peak"] == 25 * GB
    assert largest["memory"] == {"arguments": 6 * GB, "temporary": 10 * GB, "outputs": GB, "beside": 8 * GB}
    not_described = verdicts.judge_stage(None, chips.parse("h100:8"), MESH)
    assert not_described["fits"]
    assert check.lines(not_described) == ["not compiled: its trainer has no build"]


@pytest.mark.parametrize(
    ("work", "words"),
    [
        ("train", ['remat = "full"', "gradient_accumulation_steps"]),
        ("sample", ["sampling.mesh.tensor", "max_completion_length"]),
        ("read", ["shorter rows"]),
        ("update", ["mesh.fsdp"]),
    ],
)
def test_what_to_change_where_something_does_not_fit(work: str, words: list[str]) -> None:
    large = program("big", work, memory={"arguments": 0, "outputs": 0, "aliased": 0, "temporary": 70 * GB})
    made = verdicts.judge_stage(stage(large), chips.parse("h100:8"), MESH)
    assert not made["fits"]
    for word in words:
        assert word in " ".join(made["advice"])
    assert "does not fit: 78.0 GB of 76.5 GB in big" in check.lines(made)
    already = verdicts.judge_stage({**stage(large), "remat": "full"}, chips.parse("h100:8"), MESH)
    assert "remat" not in " ".join(already["advice"])


def test_a_compiler_that_refuses_for_memory_gets_the_same_advice() -> None:
    refused = {key: value for key, value in program().items() if key not in ("memory", "once", "loops")}
    made = verdicts.judge_stage(
        stage({**refused, "error": "RESOURCE_EXHAUSTED: used 20G"}), chips.parse("v5e:2x4"), MESH
    )
    assert not made["fits"]
    assert 'remat = "full"' in " ".join(made["advice"])
    other = verdicts.judge_stage(stage({**refused, "error": "INTERNAL: a bug"}), chips.parse("v5e:2x4"), MESH)
    assert other["advice"] == ["accumulate 8 × 512: the compiler says: INTERNAL: a bug"]


def test_a_state_that_is_too_large_is_to_be_spread_and_a_row_to_be_cut() -> None:
    state = {"parameters": 20 * GB, "optimizer": 40 * GB}
    large = stage(program("apply", "update", beside=70 * GB), resident=state)
    (advice,) = verdicts.judge_stage(large, chips.parse("h100:8"), {**MESH, "fsdp": 1})["advice"]
    assert "parameters, optimizer: set mesh = { fsdp = 8 }" in advice
    (advice,) = verdicts.judge_stage(large, chips.parse("h100:8"), MESH)["advice"]
    assert "use more devices, or train adapters" in advice
    # A row per device cannot be split further.
    memory = {"arguments": 0, "outputs": 0, "aliased": 0, "temporary": 70 * GB}
    large = stage(program("big", memory=memory, rows=8))
    (advice,) = verdicts.judge_stage(large, chips.parse("h100:8"), MESH)["advice"]
    assert "mesh.context" in advice
    assert "gradient_accumulation_steps" not in advice
