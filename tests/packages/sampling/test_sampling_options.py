"""Repetition penalty, stop strings, further stop tokens and warm-up, against a loop in NumPy.

And sequences that take turns in a few slots: nothing but the number of steps depends on it.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from rlhf_core.errors import InputError
from rlhf_core.mesh import make_mesh
from rlhf_core.sampling import Rollouts, Sampler, SamplingOptions, loop, most_steps
from tests.shared import samplers
from tests.shared.compiled import compilations

NEW = 12
KEY = jax.random.key(3)


@pytest.fixture(scope="module")
def model(tiny: ModuleType) -> Any:
    return tiny.make_model(scale=6.0)


def make_sampler(model: Any, *, mesh: Any = None, **given: Any) -> Sampler:
    counts = {
        "num_generations": 16,
        "prompts_per_call": 4,
        "max_prompt_length": 40,
        "max_completion_length": NEW,
    }
    fixed = {"stop_ids": (), "tokenizer": model.tokenizer, **counts}
    return Sampler(samplers.inputs(model.definition, model.mesh if mesh is None else mesh, **fixed | given))


def make_prompts(model: Any, *texts: str) -> list[np.ndarray]:
    return [np.asarray(model.tokenizer(text)["input_ids"], np.int32) for text in texts]


def penalised(logits: np.ndarray, ids: np.ndarray, penalty: float) -> np.ndarray:
    out = logits.copy()
    for i in set(ids.tolist()):
        out[i] = out[i] / penalty if out[i] > 0 else out[i] * penalty
    return out


def test_the_penalty_comes_before_temperature_and_filters(model: Any) -> None:
    (prompt,) = make_prompts(model, "a b c d e f g h i j k l m n o p q r s t u v w x y z")
    count, penalty = 8192, 2.0
    options = {"temperature": 1.5, "top_k": 12, "top_p": 0.9, "min_p": 0.02}
    sampler = make_sampler(
        model,
        num_generations=count,
        prompts_per_call=1,
        max_completion_length=1,
        repetition_penalty=penalty,
        **options,
    )
    out = sampler(model.params, [prompt], KEY)
    logits = samplers.full_logits(model.definition, model.params, prompt)[-1]

    def shares(logits: np.ndarray) -> np.ndarray:
        p = np.exp(samplers.log_softmax(logits / 1.5))
        p[p < np.sort(p)[-12]] = 0
        p /= p.sum()
        likelier = np.array([p[p > own].sum() for own in p])
        p[likelier >= 0.9] = 0
        p[p < 0.02 * p.max()] = 0
        return p / p.sum()

    expected = shares(penalised(logits, prompt, penalty)) * count
    observed = np.bincount(out.tokens[:, 0], minlength=len(logits))
    kept = expected > 0
    assert kept.tolist() != (shares(logits) > 0).tolist()
    assert not observed[~kept].any()
    assert ((observed - expected)[kept] ** 2 / expected[kept]).sum() < 2.5 * kept.sum()


def decoded(model: Any, tokens: np.ndarray) -> str:
    return str(model.tokenizer.decode(tokens.tolist(), skip_special_tokens=True))


def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it(model: Any) -> None:
    prompts = make_prompts(model, "a b", "c d e f", "g")
    plain = make_sampler(model)(model.params, prompts, KEY)
    texts = [decoded(model, row) for row in plain.tokens]
    strings = (texts[0][8:13], texts[20][4:7] + " ", "Q")  # of three words, of two and a half, of one
    out = make_sampler(model, stop_strings=strings)(model.params, prompts, KEY)
    assert out.finished[0]
    assert out.finished[20]
    assert not out.finished.all()
    for j in range(48):
        # The space after a word is written by the word after it.
        ends = [
            t + 1 for t in range(NEW) if any(s in decoded(model, plain.tokens[j, : t + 1]) for s in strings)
        ]
        length = ends[0] if ends else NEW
        assert (out.lengths[j], out.finished[j]) == (length, bool(ends))
        np.testing.assert_array_equal(out.tokens[j, :length], plain.tokens[j, :length])
        np.testing.assert_allclose(out.logps[j, :length], plain.logps[j, :length], atol=1e-5)
        assert not out.tokens[j, length:].any()


def test_stop_strings_are_not_looked_for_in_the_prompt_nor_across_its_end(model: Any) -> None:
    prompts = make_prompts(model, "a b c")
    plain = make_sampler(model)(model.params, prompts, KEY)
    border = [f"c {decoded(model, row[:1])}" for row in plain.tokens]
    texts = [decoded(model, row) for row in plain.tokens]
    strings = [s for s in ("a b", "b c", *border) if not any(s in text for text in texts)]
    assert set(border) & set(strings)
    out = make_sampler(model, stop_strings=strings)(model.params, prompts, KEY)
    samplers.assert_same(out, plain)


def test_further_stop_tokens(model: Any) -> None:
    """Of two stop tokens one is a further one: they end a completion and count all the same."""
    prompts = make_prompts(model, "a b", "c d e f")
    plain = make_sampler(model)(model.params, prompts, KEY)
    stops = int(plain.tokens[0, 2]), int(plain.tokens[17, 3])
    sampler = make_sampler(model, stop_ids=stops[:1], stop_token_ids=stops[1:])
    out = sampler(model.params, prompts, KEY)
    assert out.finished[0]
    assert out.finished[17]
    found = np.isin(plain.tokens, stops)
    finished = found.any(1)
    lengths = np.where(finished, found.argmax(1) + 1, NEW)
    written = np.arange(NEW) < lengths[:, None]
    cut = Rollouts(np.where(written, plain.tokens, 0), lengths, np.where(written, plain.logps, 0), finished)
    samplers.assert_same(out, cut)


def carried(model: Any, **options: Any) -> list[tuple[int, ...]]:
    """The shapes that the loop carries."""
    sampler = make_sampler(model, **options)
    program = loop.SamplingProgram(
        model.definition, sampler.options, model.mesh, (), 4, 16, 0, "threefry2x32"
    )
    arrays = [
        np.zeros((4, 32), np.int32),
        np.ones(4, np.int32),
        np.zeros(4, np.int32),
        np.zeros(16, np.uint32),
        np.zeros(2, np.uint32),
    ]
    traced = functools.partial(loop.generate.trace, program=program)
    jaxpr = traced(model.params, *arrays, sampler._stop_table).jaxpr.jaxpr
    (decoding,) = [equation for equation in jaxpr.eqns if equation.primitive.name == "while"][-1:]
    return sorted(out.aval.shape for out in decoding.outvars)


def test_what_is_off_is_not_carried(model: Any) -> None:
    off = carried(model)
    assert (16, 48) not in off
    assert carried(model, repetition_penalty=2.0) == sorted([*off, (16, 48)])
    assert carried(model, stop_strings=("a",)) == sorted([*off, (16,)])
    assert carried(model, stop_token_ids=(5,)) == off


def test_nothing_compiles_after_warm_up(model: Any) -> None:
    options = {"temperature": 0.81, "stop_strings": ("a b",), "repetition_penalty": 1.1}
    make_sampler(model)(model.params, make_prompts(model, "a"), KEY)
    sampler = make_sampler(model, num_generations=4, **options)
    with compilations() as compiled:
        sampler.warm_up(model.params, [1, 33, 2, 40, 32])
        prompts = [np.full(length, 5, np.int32) for length in (32, 1, 40, 8, 33, 9)]
        out = sampler(model.params, prompts, jax.random.key(9), np.arange(50, 74))
    assert len(compiled) == 2  # one a padded length; the calls waited for them and compiled nothing
    again = make_sampler(model, num_generations=4, **options)
    samplers.assert_same(out, again(model.params, prompts, jax.random.key(9), np.arange(50, 74)))
    with pytest.raises(InputError, match="max_prompt_length=40"):
        sampler.warm_up(model.params, [41])


def test_lists_are_tuples_so_that_options_are_hashable() -> None:
    options = SamplingOptions(stop_strings=["a", "b"], stop_token_ids=[1])
    assert options == SamplingOptions(stop_strings=("a", "b"), stop_token_ids=(1,))
    assert hash(options) == hash(SamplingOptions.from_dict(options.to_dict()))


LONGEST, GROUP, ALL = 24, 3, 1000


def ask(
    model: Any,
    in_slots: Callable[..., None],
    slots: int,
    *,
    last: int = ALL,
    mesh: Any = None,
    **options: Any,
) -> Rollouts:
    """Nine prompts, three completions each."""
    in_slots(slots, last)
    rng = np.random.default_rng(0)
    words = len(model.tokenizer)
    prompts = [rng.integers(3, words, n).astype(np.int32) for n in (1, 5, 33, 2, 17, 40, 8, 3, 11)]
    mesh = model.mesh if mesh is None else mesh
    counts = {"num_generations": GROUP, "prompts_per_call": len(prompts), "max_prompt_length": 40}
    given = {"stop_ids": tuple(range(3, 3 + words // 10)), "tokenizer": model.tokenizer, **counts, **options}
    sampler = Sampler(samplers.inputs(model.definition, mesh, max_completion_length=LONGEST, **given))
    return sampler(jax.device_put(model.params, model.definition.shardings(mesh)), prompts, KEY)


OF_SLOTS: dict[str, dict[str, Any]] = {
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
    options: str, cases: tuple[tuple[int, int], ...], model: Any, in_slots: Callable[..., None]
) -> None:
    expected = ask(model, in_slots, ALL, **OF_SLOTS[options])
    assert len(set(expected.lengths.tolist())) > 5
    assert 0 < expected.finished.sum() < len(expected.finished)
    for slots, last in cases:
        samplers.assert_same(ask(model, in_slots, slots, last=last, **OF_SLOTS[options]), expected)


@pytest.mark.long
def test_nor_does_a_mesh(model: Any, in_slots: Callable[..., None]) -> None:
    """Nine prompts on four shards of rows: three wait in each, those of one shard for one prompt that is not there."""
    expected = ask(model, in_slots, ALL, **OF_SLOTS["strings"])
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    for slots, last in ((2, ALL), (4, 1)):
        found = ask(model, in_slots, slots, last=last, mesh=mesh, **OF_SLOTS["strings"])
        samplers.assert_same(found, expected)


def test_a_free_slot_is_reused_immediately(
    model: Any, in_slots: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are those of a queue in Python, and stay below what is set aside for them."""
    slots = 4
    written: list[loop.Written] = []
    monkeypatch.setattr(
        "rlhf_core.sampling.sampler.read_completions",
        lambda *results: written.append(results[0]) or loop.read_completions(*results),
    )
    lengths = ask(model, in_slots, ALL, **OF_SLOTS["strings"]).lengths
    ask(model, in_slots, slots, **OF_SLOTS["strings"])
    order = np.argsort([1, 5, 33, 2, 17, 40, 8, 3, 11], kind="stable")
    busy = [0] * slots
    for each in lengths.reshape(-1, GROUP)[order].reshape(-1):
        heapq.heappush(busy, heapq.heappop(busy) + int(each))
    used = np.flatnonzero((written[-1].ends > 0).any(1))
    assert used[-1] + 1 == max(busy)
    assert len(written[-1].ends) == most_steps(len(lengths), slots, LONGEST)


@pytest.mark.parametrize(("sequences", "slots", "steps"), [(7, 3, 30), (6, 3, 20), (1, 1, 10), (3, 8, 10)])
def test_steps_set_aside(sequences: int, slots: int, steps: int) -> None:
    assert most_steps(sequences, slots, 10) == steps
