"""The sampler against full forward passes of the same model."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest

from rlhf_core import SAMPLER, plugins
from rlhf_core.errors import InputError
from rlhf_core.mesh import make_mesh
from rlhf_core.models import Definition
from rlhf_core.sampling import Rollouts, Sampler, bucket
from tests.shared import samplers
from tests.shared.compiled import compilations
from tests.shared.decoder_configs import defined

VOCAB, NEW = samplers.VOCAB, 12
STOPS = (3, 9, 11)
CONFIG = {**samplers.SIZES, "model_type": "qwen3", "tie_word_embeddings": True, "initializer_range": 0.5}


@functools.cache
def model() -> tuple[Definition, Any]:
    definition = defined(CONFIG, "lm")
    return definition, jax.jit(definition.init)(jax.random.key(1))


def make_prompts(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(sum(lengths))
    return [rng.integers(0, VOCAB, length).astype(np.int32) for length in lengths]


def make_sampler(
    *, stop_ids: Sequence[int] = (), definition: Any = None, mesh: Any = None, **given: Any
) -> Sampler:
    counts = {
        "num_generations": 1,
        "prompts_per_call": 4,
        "max_prompt_length": 40,
        "max_completion_length": NEW,
    }
    return Sampler(samplers.inputs(definition or model()[0], mesh, stop_ids=stop_ids, **counts | given))


class OddIds:
    """Stands for a tokenizer with a hole at ids 7 and 8, whose ids end at 24."""

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(25) if i not in (7, 8)}


ABSENT = np.array([7, 8, *range(25, VOCAB)])


def teacher_forced(prompt: np.ndarray, completion: np.ndarray, temperature: float) -> np.ndarray:
    """Log-probabilities of a completion's tokens among the ids that the tokenizer has."""
    logits = samplers.full_logits(*model(), [*prompt, *completion])[len(prompt) - 1 : -1] / temperature
    logits[:, ABSENT] = -np.inf
    return np.asarray(samplers.log_softmax(logits)[np.arange(len(completion)), completion])


@pytest.mark.parametrize(
    ("options", "mesh"),
    [
        ({"temperature": 1.4, "top_p": 0.8, "repetition_penalty": 1.5}, {}),
        *(
            pytest.param(options, mesh, marks=pytest.mark.long)
            for options, mesh in (
                ({}, {}),
                ({"top_k": 5, "min_p": 0.05}, {}),
                ({"temperature": 0.0}, {}),
                ({"temperature": 1.3, "top_p": 0.99}, {"fsdp": 4, "tensor": 2}),
            )
        ),
    ],
    ids=str,
)
def test_log_probs_are_the_unfiltered_ones_of_a_full_forward(options: dict[str, Any], mesh: Any) -> None:
    """Of the tokenizer's ids, which alone are sampled and have probability."""
    lengths = (1, 5, 20, 7, 31) if options else (1, 5, 33, 7, 40)  # two buckets are tried once
    prompts = make_prompts(*lengths)
    definition, params = model()
    devices = make_mesh(**mesh) if mesh else make_mesh(devices=jax.devices()[:1])
    given = {"stop_ids": (3, 9), "num_generations": 3, "tokenizer": OddIds(), **options}
    sampler = make_sampler(mesh=devices, **given)
    out = sampler(jax.device_put(params, definition.shardings(devices)), prompts, jax.random.key(0))
    assert out.tokens.shape == out.logps.shape == (15, NEW)
    dtypes = [x.dtype for x in (out.tokens, out.lengths, out.logps, out.finished)]
    assert dtypes == [np.int32, np.int32, np.float32, np.bool_]
    assert not np.isin(out.tokens, ABSENT).any()
    for j in range(15):
        length = out.lengths[j]
        expected = teacher_forced(prompts[j // 3], out.tokens[j, :length], options.get("temperature") or 1.0)
        np.testing.assert_allclose(out.logps[j, :length], expected, atol=1e-4)
        assert not out.tokens[j, length:].any()
        assert not out.logps[j, length:].any()


def test_greedy_is_the_argmax_of_the_full_forward() -> None:
    prompts = make_prompts(4, 9)
    out = make_sampler(temperature=0.0, num_generations=2)(model()[1], prompts, jax.random.key(0))
    for j in range(4):
        sequence = prompts[j // 2]
        for _ in range(NEW):
            sequence = np.append(sequence, samplers.full_logits(*model(), sequence)[-1].argmax())
        np.testing.assert_array_equal(out.tokens[j], sequence[len(prompts[j // 2]) :])
    assert not out.finished.any()
    assert (out.lengths == NEW).all()


def test_each_stop_token_ends_a_completion_and_counts() -> None:
    prompts = make_prompts(*range(2, 18), *range(2, 18))
    sampler = make_sampler(stop_ids=STOPS, num_generations=2, prompts_per_call=3)
    out = sampler(model()[1], prompts, jax.random.key(0))
    unstopped = make_sampler()(model()[1], [prompts[j // 2] for j in range(64)], jax.random.key(0))
    seen = set()
    for j in range(64):
        ends = np.flatnonzero(np.isin(unstopped.tokens[j], STOPS))
        assert out.finished[j] == bool(len(ends))
        assert out.lengths[j] == (ends[0] + 1 if len(ends) else NEW)
        np.testing.assert_array_equal(out.tokens[j, : out.lengths[j]], unstopped.tokens[j, : out.lengths[j]])
        seen |= {int(out.tokens[j, out.lengths[j] - 1])} & set(STOPS)
    assert seen == set(STOPS)
    assert not out.finished.all()


def test_results_depend_neither_on_the_calls_nor_on_the_neighbours() -> None:
    prompts = make_prompts(3, 39, 8, 20, 33)
    key = jax.random.key(5)
    whole = make_sampler(stop_ids=STOPS, num_generations=2, prompts_per_call=5)(model()[1], prompts, key)
    sampler = make_sampler(stop_ids=STOPS, num_generations=2, prompts_per_call=3)
    samplers.assert_same(sampler(model()[1], prompts, key), whole)
    ids = np.arange(10)
    order = [4, 2, 0]
    chosen = np.concatenate([ids[2 * i : 2 * i + 2] for i in order])
    part = sampler(model()[1], [prompts[i] for i in order], key, chosen)
    samplers.assert_same(part, Rollouts(*(x[chosen] for x in whole)))


def test_ids_and_key_alone_decide_what_is_drawn() -> None:
    prompt = make_prompts(6)[0]
    sampler = make_sampler()
    out = sampler(model()[1], [prompt] * 3, jax.random.key(0), np.array([7, 7, 8]))
    np.testing.assert_array_equal(out.tokens[0], out.tokens[1])
    assert (out.tokens[0] != out.tokens[2]).any()
    other = sampler(model()[1], [prompt], jax.random.key(1), np.array([7]))
    assert (out.tokens[0] != other.tokens[0]).any()
    shorter = make_sampler(max_completion_length=5)(model()[1], [prompt], jax.random.key(0), np.array([7]))
    np.testing.assert_array_equal(shorter.tokens[0], out.tokens[0, :5])


@dataclass(frozen=True)
class Watched:
    """A definition that notes the rows it prefills and every token it decodes."""

    definition: Definition
    log: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.definition, name)

    def prefill(self, params: Any, tokens: Any, *rest: Any) -> Any:
        if tokens.size > 1:  # else for the shapes of its cache
            self.log.prefilled.append(tokens.shape)
        return self.definition.prefill(params, tokens, *rest)

    def decode(self, *arguments: Any) -> Any:
        jax.debug.callback(self.log.step)
        return self.definition.decode(*arguments)

    def decode_groups(self, *arguments: Any) -> Any:
        jax.debug.callback(self.log.step)
        return self.definition.decode_groups(*arguments)


class Log:
    def __init__(self) -> None:
        self.prefilled: list[tuple[int, ...]] = []
        self.steps = 0

    def step(self) -> None:
        self.steps += 1


def test_a_prompt_is_computed_once_and_decoding_stops_with_the_last_sequence() -> None:
    log = Log()
    stops = tuple(range(VOCAB // 2))
    sampler = make_sampler(
        stop_ids=stops, num_generations=3, definition=Watched(model()[0], log), max_completion_length=64
    )
    out = sampler(model()[1], make_prompts(3, 8), jax.random.key(0))
    jax.effects_barrier()
    assert log.prefilled == [(4, 32)]
    assert out.finished.all()
    assert log.steps == out.lengths.max() < 64


def test_nothing_compiles_after_the_first_call_of_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = make_sampler()
    sampler(model()[1], make_prompts(3), jax.random.key(0))
    fetched = []
    get = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: fetched.append(1) or get(x))
    with compilations() as compiled:
        sampler(model()[1], make_prompts(32, 1, 8, 9, 2), jax.random.key(1), np.arange(100, 105))
        make_sampler()(model()[1], make_prompts(8), jax.random.key(2))
        assert compiled == []
        assert len(fetched) == 3
        sampler(model()[1], make_prompts(34), jax.random.key(1))
        assert len(compiled) == 1


def test_prompts_that_do_not_fit_are_refused_by_number() -> None:
    sampler = make_sampler(max_prompt_length=10)
    with pytest.raises(InputError) as caught:
        sampler(model()[1], make_prompts(3, 0, 11), jax.random.key(0))
    assert [problem[:9] for problem in caught.value.problems] == ["prompt 2 ", "prompt 3 "]
    assert "max_prompt_length=10" in str(caught.value)
    with pytest.raises(ValueError, match="ids"):
        sampler(model()[1], make_prompts(3), jax.random.key(0), np.arange(2))


def test_the_registered_sampler_is_this_one() -> None:
    counts = {"prompts_per_call": 4, "max_prompt_length": 40}
    made = plugins.load().registry.get(SAMPLER, "jax")(samplers.inputs(model()[0], **counts))
    assert isinstance(made, Sampler)


def test_no_prompts_give_no_rollouts() -> None:
    out = make_sampler()(model()[1], [], jax.random.key(0))
    assert [x.shape for x in out] == [(0, NEW), (0,), (0, NEW), (0,), (0, NEW), (0,), (0, NEW, 0, 0), (0,)]


def test_buckets_are_powers_of_two_up_to_the_longest() -> None:
    """Of a prompt without its last token; the longest has a multiple of eight, too."""
    assert [bucket(n, 200) for n in (1, 33, 34, 129, 130, 200)] == [32, 32, 64, 128, 200, 200]
    assert [bucket(n, n) for n in (1, 9, 10, 1024)] == [8, 8, 16, 1024]
