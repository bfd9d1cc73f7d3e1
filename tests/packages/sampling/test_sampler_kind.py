"""A sampler of one's own, in place of the built-in one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from rlhf_core import SAMPLER, Registry, Rollouts, SamplerInputs, hookimpl, plugins
from rlhf_core.errors import InputError
from rlhf_core.sampling import Sampler
from tests.shared import samplers


@dataclass(frozen=True)
class LastToken:
    """Draws from the policy as if the last token were the whole text, in NumPy; at every `halt`-th token it stops."""

    halt: int = 5

    def __call__(self, inputs: SamplerInputs) -> LastTokenSampler:
        if inputs.options.stop_strings:
            raise InputError("sampling.stop_strings: the sampler 'last_token' has none")
        return LastTokenSampler(self.halt, inputs)


@dataclass(frozen=True)
class LastTokenSampler:
    halt: int
    inputs: SamplerInputs

    def __call__(
        self, params: Any, prompts: Sequence[np.ndarray], key: jax.Array, ids: np.ndarray | None = None
    ) -> Rollouts:
        inputs, group = self.inputs, self.inputs.num_generations
        longest = inputs.options.max_completion_length
        vocab = inputs.definition.vocab_size
        tokens = np.arange(vocab, dtype=np.int32)[:, None]
        hidden = jax.jit(inputs.definition.hidden)(
            params, tokens, np.zeros_like(tokens), np.ones_like(tokens)
        )
        kernel = np.asarray(inputs.definition.unembedding(params)[0], np.float64)
        logits = np.asarray(hidden, np.float64)[:, 0] @ kernel
        log_p = logits / inputs.options.temperature
        log_p -= np.log(np.exp(log_p).sum(-1, keepdims=True))
        count = len(prompts) * group
        written = np.zeros((count, longest), np.int32)
        lengths, finished = np.zeros(count, np.int32), np.zeros(count, bool)
        logps = np.zeros((count, longest), np.float32)
        stops = (*inputs.stop_ids, *inputs.options.stop_token_ids)
        for j, own in enumerate(range(count) if ids is None else ids):
            rng = np.random.default_rng([int(own), *np.asarray(jax.random.key_data(key)).tolist()])
            last = int(prompts[j // group][-1])
            for t in range(longest):
                token = int(rng.choice(vocab, p=np.exp(log_p[last])))
                written[j, t], logps[j, t], lengths[j] = token, log_p[last, token], t + 1
                last, finished[j] = token, token in stops or token % self.halt == 0
                if finished[j]:
                    break
        return Rollouts(written, lengths, logps, finished)


class Stranger:
    @hookimpl
    def rlhf_register(self, registry: Registry) -> None:
        registry.add(SAMPLER, "last_token", LastToken)


@pytest.fixture(scope="module")
def model(tiny: ModuleType) -> Any:
    return tiny.make_model(scale=4.0)


def inputs_for(model: Any, **options: Any) -> SamplerInputs:
    counts = {
        "num_generations": 3,
        "prompts_per_call": 2,
        "max_prompt_length": 16,
        "max_completion_length": 8,
    }
    given = {"stop_ids": model.stop_ids, "tokenizer": model.tokenizer, **counts, **options}
    return samplers.inputs(model.definition, model.mesh, **given)


PROMPTS = [np.array([5, 9, 7], np.int32), np.array([11], np.int32), np.array([40, 3], np.int32)]


def test_a_strangers_sampler_by_name_with_options(model: Any) -> None:
    registry = plugins.load(objects=[Stranger()]).registry
    assert {"jax", "last_token"} <= {*registry.names(SAMPLER)}
    assert registry.check(SAMPLER, "last_token", {"halt": "often"}) == [
        ("halt", "expected a whole number, got 'often'")
    ]
    sampler = registry.get(SAMPLER, "last_token", halt=7)(inputs_for(model, temperature=0.8))
    out = sampler(model.params, PROMPTS, jax.random.key(0))
    assert out.tokens.shape == (9, 8)
    last = out.tokens[np.arange(9), out.lengths - 1]
    assert (out.finished == ((last % 7 == 0) | (last == 1))).all()
    part = sampler(model.params, PROMPTS[1:2], jax.random.key(0), np.arange(3, 6))
    for whole, own in zip(out, part, strict=True):
        np.testing.assert_array_equal(whole[3:6], own)
    with pytest.raises(InputError, match=r"sampling\.stop_strings"):
        registry.get(SAMPLER, "last_token")(inputs_for(model, stop_strings=("a",)))


def test_the_built_in_is_one_of_them(model: Any) -> None:
    inputs = inputs_for(model, temperature=0.8, stop_strings=("a b", "c"), stop_token_ids=(9,))
    sampler = plugins.load().registry.get(SAMPLER, "jax")(inputs)
    out = sampler(model.params, PROMPTS, jax.random.key(0))
    for own, expected in zip(out, Sampler(inputs)(model.params, PROMPTS, jax.random.key(0)), strict=True):
        np.testing.assert_array_equal(own, expected)
