"""Sequences that take turns in a few slots: nothing but the number of steps depends on it."""

from __future__ import annotations

import heapq
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from rlhf_core.mesh import make_mesh
from rlhf_core.sampling import Rollouts, Sampler, most_steps, placement
from rlhf_core.sampling.loop import Written, read_completions
from tests.shared import samplers

NEW, GROUP = 24, 3
KEY = jax.random.key(2)
ALL = 1000


@pytest.fixture(scope="module")
def model(tiny: ModuleType) -> Any:
    return tiny.make_model(scale=6.0)


def ask(
    model: Any,
    monkeypatch: pytest.MonkeyPatch,
    slots: int,
    *,
    last: int = ALL,
    mesh: Any = None,
    **options: Any,
) -> Rollouts:
    """Nine prompts, three completions each."""
    monkeypatch.setitem(placement.SLOTS, "cpu", slots)
    monkeypatch.setattr("rlhf_core.sampling.sampler.LAST_SLOTS", last)
    rng = np.random.default_rng(0)
    words = len(model.tokenizer)
    prompts = [rng.integers(3, words, n).astype(np.int32) for n in (1, 5, 33, 2, 17, 40, 8, 3, 11)]
    mesh = model.mesh if mesh is None else mesh
    counts = {"num_generations": GROUP, "prompts_per_call": len(prompts), "max_prompt_length": 40}
    given = {"stop_ids": tuple(range(3, 3 + words // 10)), "tokenizer": model.tokenizer, **counts, **options}
    sampler = Sampler(samplers.inputs(model.definition, mesh, max_completion_length=NEW, **given))
    return sampler(jax.device_put(model.params, model.definition.shardings(mesh)), prompts, KEY)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalty": {"repetition_penalty": 1.3, "temperature": 0.8},
    "strings": {"stop_strings": ("a", "e")},
}


@pytest.mark.parametrize(
    ("options", "cases"),
    [
        pytest.param("plain", ((1, ALL), (8, 1), (20, 2)), marks=pytest.mark.long),
        pytest.param("penalty", ((4, 1),), marks=pytest.mark.long),
        ("strings", ((4, 1), (ALL, 1))),
    ],
    ids=str,
)
def test_the_number_of_slots_changes_nothing(
    options: str, cases: tuple[tuple[int, int], ...], model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ask(model, monkeypatch, ALL, **OPTIONS[options])
    assert len(set(expected.lengths.tolist())) > 5
    assert 0 < expected.finished.sum() < len(expected.finished)
    for slots, last in cases:
        samplers.assert_same(ask(model, monkeypatch, slots, last=last, **OPTIONS[options]), expected)


@pytest.mark.long
def test_nor_does_a_mesh(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine prompts on four shards of rows: three wait in each, those of one shard for one prompt that is not there."""
    expected = ask(model, monkeypatch, ALL, **OPTIONS["strings"])
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    for slots, last in ((2, ALL), (4, 1)):
        found = ask(model, monkeypatch, slots, last=last, mesh=mesh, **OPTIONS["strings"])
        samplers.assert_same(found, expected)


def test_a_free_slot_is_reused_immediately(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are those of a queue in Python, and stay below what is set aside for them."""
    slots = 4
    written: list[Written] = []
    monkeypatch.setattr(
        "rlhf_core.sampling.sampler.read_completions",
        lambda *results: written.append(results[0]) or read_completions(*results),
    )
    lengths = ask(model, monkeypatch, ALL, **OPTIONS["strings"]).lengths
    ask(model, monkeypatch, slots, **OPTIONS["strings"])
    order = np.argsort([1, 5, 33, 2, 17, 40, 8, 3, 11], kind="stable")
    busy = [0] * slots
    for each in lengths.reshape(-1, GROUP)[order].reshape(-1):
        heapq.heappush(busy, heapq.heappop(busy) + int(each))
    used = np.flatnonzero((written[-1].ends > 0).any(1))
    assert used[-1] + 1 == max(busy)
    assert len(written[-1].ends) == most_steps(len(lengths), slots, NEW)


@pytest.mark.parametrize(("sequences", "slots", "steps"), [(7, 3, 30), (6, 3, 20), (1, 1, 10), (3, 8, 10)])
def test_steps_set_aside(sequences: int, slots: int, steps: int) -> None:
    assert most_steps(sequences, slots, 10) == steps
