"""The sampler's own layout: the same completions on every mesh, and nothing of the weights' size sent per token."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from rlhf_kernels import attend_visible

from rlhf_core.errors import InputError
from rlhf_core.mesh import make_mesh, planned_mesh
from rlhf_core.models import Definition
from rlhf_core.sampling import Rollouts, placement
from tests.shared import samplers
from tests.shared.decoder_configs import defined
from tests.shared.drawn import params_of

FAMILIES = {name: table for name, table in samplers.FAMILIES.items() if name != "llama"}


@functools.cache
def model(name: str) -> tuple[Definition, Any]:
    config = {**samplers.SIZES, "initializer_range": 0.5, **FAMILIES[name]}
    definition = defined(config, "lm")
    if name.startswith("qwen3_5"):  # short outputs of the delta rule are normalised, which enlarges rounding
        return definition, jax.jit(definition.init)(jax.random.key(1))
    return definition, params_of(definition, 1, 0.5)


def sample(name: str, mesh: Any, tensor: int | None = None, **options: Any) -> Rollouts:
    return samplers.sample(*model(name), mesh, tensor, **options)


def require_full_forward(name: str, found: Rollouts) -> None:
    definition, params = model(name)
    prompts = [prompt for prompt in samplers.five_prompts() for _ in range(3)]
    for i, (prompt, length) in enumerate(zip(prompts, found.lengths, strict=True)):
        expected = samplers.full_logps(definition, params, prompt, found.tokens[i, :length])
        np.testing.assert_allclose(found.logps[i, :length], expected, atol=1e-4, err_msg=f"{name} {i}")


KEPT = ("gpt_oss", "qwen3_5", "gemma4", "phi3")
"""Sinks; states; keys and values of other layers; fused projections. Of windows and soft caps, below."""


@pytest.mark.parametrize(
    "name", [name if name in KEPT else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES]
)
def test_devices_that_share_layers_give_the_same(name: str) -> None:
    """Other tests have qwen2 (`test_conversations.py`), qwen3 and gemma2 on such devices."""
    one = sample(name, make_mesh(devices=jax.devices()[:1]))
    require_full_forward(name, one)
    samplers.assert_same(sample(name, make_mesh(fsdp=8), tensor=4), one)


@pytest.mark.parametrize(
    "name", [name if name == "gemma2" else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES]
)
def test_a_prompt_held_once_gives_the_same_as_a_copy_for_each_completion(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one device, and on eight of which two share layers: five prompts of four shards, three completions each."""
    meshes = ((make_mesh(devices=jax.devices()[:1]), None), (make_mesh(fsdp=8), 2))
    shared = [sample(name, *each) for each in meshes]
    require_full_forward(name, shared[0])
    monkeypatch.setattr(placement, "shares_prompts", lambda definition: False)
    for (mesh, tensor), found in zip(meshes, shared, strict=True):
        samplers.assert_same(found, sample(name, mesh, tensor))


@pytest.mark.parametrize(
    ("kernel", "name"), [("gpu", "gemma2"), pytest.param("tpu", "phi3", marks=pytest.mark.long)]
)
def test_kernels_that_read_what_is_visible_give_the_same(
    kernel: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In interpret mode."""
    mesh = make_mesh(devices=jax.devices()[:1])
    expected = sample(name, mesh)
    over = mock.Mock(wraps=functools.partial(attend_visible, on=kernel, interpret=True))
    monkeypatch.setattr("rlhf_core.models.attention_cached.visible_kernel", lambda: over)
    # A filter that keeps everything: not the program that was traced without kernels.
    samplers.assert_same(sample(name, mesh, top_k=samplers.VOCAB), expected)
    assert over.call_count


def test_prompts_prefilled_in_parts_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five prompts of 24 tokens by twos; the last part overlaps the one before."""
    whole = sample("gemma2", make_mesh(devices=jax.devices()[:1]))
    monkeypatch.setitem(placement.PREFILL_TOKENS, "cpu", 48)
    samplers.assert_same(sample("gemma2", make_mesh(devices=jax.devices()[:1])), whole)
    samplers.assert_same(sample("gemma2", make_mesh(fsdp=8), tensor=4), whole)


@pytest.mark.parametrize(
    ("name", "tensor", "said"), [("qwen3", 8, "shared by 1, 2, 4"), ("qwen3", 3, "8 of them linked")]
)
def test_a_size_that_does_not_fit_is_refused(name: str, tensor: int, said: str) -> None:
    with pytest.raises(InputError, match=r"sampling\.mesh\.tensor") as caught:
        sample(name, make_mesh(fsdp=8), tensor)
    assert said in str(caught.value)


LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
}
PER_TOKEN = 32 * 2 * 8 * 128 * 2
"""Bytes of a token's keys and values: layers, both, heads, head size, bfloat16."""


def plan(memory: int | None, sizes: tuple[int, ...] = (1, 2, 4, 8), prompts: int = 128) -> placement.Room:
    definition = defined(LLAMA_8B, "lm").computing(dtype="bfloat16")
    return placement.plan_room(
        definition,
        planned_mesh(8, fsdp=8),
        sizes,
        memory=memory,
        prompts=prompts,
        num_generations=8,
        prompt_length=1023,
        length=2047,
    )


def test_a_thousand_sequences_of_an_8b_model_fit_beside_its_training_state() -> None:
    room = plan(48 * 10**9)
    assert room.slots * (8 // room.tensor) >= 1024
    assert room.prompts == 128


@pytest.mark.parametrize("gigabytes", [6, 12, 24, 48, 96])
def test_what_is_planned_fits_and_fewer_calls_would_not(
    gigabytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(placement.PREFILL_TOKENS, "cpu", 16_384)
    memory = gigabytes * 10**9
    room = plan(memory, prompts=4096)
    parameters = (
        8.03e9 - 128_256 * 4096
    ) * 2 / room.tensor + 128_256 * 4096 * 2  # the embedding table is whole
    prefill = 16 * 1023 * 4096 * 16 * 2 / room.tensor
    groups = 8 // room.tensor

    def size(prompts: int) -> float:
        """Bytes per device: a prompt once, eight completions of 1,024 tokens, and four arrays of logits for each."""
        caches = prompts * (1023 + 8 * 1024) * PER_TOKEN + prompts * 8 * 4 * 128_256 * 4
        return parameters + prefill + caches / room.tensor

    in_group = room.prompts // groups
    assert (room.slots, room.shares_prompts) == (8 * in_group, True)
    assert room.bytes == pytest.approx(size(in_group), rel=1e-3)
    assert room.bytes <= memory
    calls = -(-4096 // room.prompts)
    assert room.slots == 1024 * room.tensor or size(-(-4096 // (calls - 1) // groups)) > memory
    if room.tensor > 1:  # half as many devices would not have room for enough
        fewer = plan(memory, (room.tensor // 2,), prompts=4096)
        assert fewer.slots < 128 * fewer.tensor or (fewer.bytes or 0) > memory


def test_completions_of_one_prompt_take_turns_where_they_do_not_all_fit() -> None:
    room = placement.plan_room(
        defined(LLAMA_8B, "lm").computing(dtype="bfloat16"),
        planned_mesh(1),
        [1],
        memory=20 * 10**9,
        prompts=4,
        num_generations=64,
        prompt_length=1023,
        length=2047,
    )
    assert (room.prompts, room.shares_prompts) == (1, False)
    assert 1 < room.slots < 64
    assert (room.bytes or 0) <= 20 * 10**9


def test_few_prompts_take_few_slots_in_equal_shares() -> None:
    assert plan(48 * 10**9, (8,), prompts=1).slots == 8
    assert plan(48 * 10**9, (4,), prompts=3)[:3] == (4, 16, 4)
    assert plan(None, (2,), prompts=4096)[:3] == (2, 64, 4096)
