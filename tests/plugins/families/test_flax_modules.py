"""Models as flax modules, and flax modules as models."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rlhf_families import nnx_family, nnx_model, nnx_module

from rlhf_core import create_state, load_model
from rlhf_core.errors import InputError
from rlhf_core.models import Definition, Model, paths
from rlhf_core.sampling import Sampler
from rlhf_core.testing import check_model
from tests.shared import samplers

IDS = np.array([[5, 9, 4, 7], [8, 3, 3, 0]], np.int32)
MASK = np.array([[1, 1, 1, 1], [1, 1, 1, 0]], np.int32)
SIZES = {"model_type": "small", "vocab_size": 31, "hidden_size": 16}


class Small(nnx.Module):
    def __init__(self, config: Any, rngs: nnx.Rngs) -> None:
        width = config["hidden_size"]
        self.words = nnx.Embed(config["vocab_size"], width, rngs=rngs)
        self.places = nnx.Embed(64, width, rngs=rngs)
        self.layers = nnx.List([nnx.MultiHeadAttention(2, width, rngs=rngs, decode=False)])

    def states(self, input_ids: jax.Array, positions: jax.Array, attention_mask: jax.Array) -> jax.Array:
        x = self.words(input_ids) + self.places(positions)
        for layer in self.layers:
            x = x + layer(x, mask=attention_mask[:, None])
        return x

    def __call__(self, input_ids: jax.Array, positions: jax.Array, attention_mask: jax.Array) -> jax.Array:
        return self.words.attend(self.states(input_ids, positions, attention_mask))


class WithHidden(Small):
    hidden = Small.states


class Cached(nnx.Module):
    """One head of attention with keys and values that are kept."""

    def __init__(self, config: Any, rngs: nnx.Rngs) -> None:
        width = config["hidden_size"]
        self.words = nnx.Embed(config["vocab_size"], width, rngs=rngs)
        self.places = nnx.Embed(64, width, rngs=rngs)
        self.query, self.key, self.value = (nnx.Linear(width, width, rngs=rngs) for _ in range(3))

    def attend(self, x: jax.Array, kept: Any, seen: jax.Array) -> jax.Array:
        weights = jnp.where(seen, self.query(x) @ kept["k"].swapaxes(1, 2), -jnp.inf)
        return self.words.attend(x + jax.nn.softmax(weights, axis=-1) @ kept["v"])

    def prefill(self, input_ids: jax.Array, positions: jax.Array, attention_mask: jax.Array) -> Any:
        x = self.words(input_ids) + self.places(positions)
        kept = {"k": self.key(x), "v": self.value(x)}
        return self.attend(x, kept, attention_mask), kept

    def decode(self, cache: Any, input_ids: Any, positions: Any, visible: Any, slot: Any) -> Any:
        x = self.words(input_ids) + self.places(positions)
        cache = {
            "k": cache["k"].at[:, slot].set(self.key(x)),
            "v": cache["v"].at[:, slot].set(self.value(x)),
        }
        return self.attend(x[:, None], cache, visible[:, None])[:, 0], cache

    def __call__(self, input_ids: jax.Array, positions: jax.Array, attention_mask: jax.Array) -> jax.Array:
        logits: jax.Array = self.prefill(input_ids, positions, attention_mask)[0]
        return logits


class Wrapped(nnx.Module):
    """The decoder within a stranger's module: its logits and gradients are known."""

    def __init__(self, model: Model) -> None:
        self.inner, self.definition = nnx_module(model), model.definition

    def __call__(self, input_ids: jax.Array, positions: jax.Array, attention_mask: jax.Array) -> jax.Array:
        params = nnx.to_pure_dict(nnx.state(self.inner))
        time = input_ids.shape[1]
        until = jnp.max(jnp.where(attention_mask, jnp.arange(1, time + 1)[:, None], 0), axis=1)
        return self.definition.logits(params, self.definition.hidden(params, input_ids, positions, until))


def loss(logits: jax.Array) -> jax.Array:
    return jnp.square(jnp.where(MASK[..., None] > 0, logits, 0.0)).mean()


def close(found: Any, expected: Any) -> None:
    for (path, one), (_, two) in zip(paths(found), paths(expected), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6, err_msg=".".join(path))


def by_decoder(model: Model) -> tuple[jax.Array, Any]:
    def of(params: Any) -> jax.Array:
        return loss(model.definition.padded_logits(params, IDS, MASK))

    value, gradient = jax.value_and_grad(of)(model.params)
    return value, gradient


def test_a_model_as_a_module_has_its_arrays_values_and_gradients(tiny: ModuleType) -> None:
    model = tiny.make_model()
    module = nnx_module(model)
    state = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    assert all(one is two for (_, one), (_, two) in zip(paths(state), paths(model.params), strict=True))
    np.testing.assert_allclose(module(IDS, MASK), model.logits(IDS, MASK), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(module(IDS), model.logits(IDS, np.ones_like(IDS)), rtol=1e-4, atol=1e-5)
    value, gradient = nnx.value_and_grad(lambda module: loss(module(IDS, MASK)))(module)
    expected, wanted = by_decoder(model)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    close(nnx.to_pure_dict(gradient), wanted)
    graph, split = nnx.split(module)
    np.testing.assert_allclose(nnx.merge(graph, split)(IDS), module(IDS))
    scores = tiny.make_model("score")
    np.testing.assert_allclose(nnx_module(scores)(IDS, MASK), scores.scores(IDS, MASK), rtol=1e-4, atol=1e-5)


def test_a_module_as_a_model_has_its_values_and_gradients(tiny: ModuleType) -> None:
    model = tiny.make_model()
    made = nnx_model(Wrapped(model), tokenizer=model.tokenizer)
    assert made.definition.vocab_size == model.definition.vocab_size
    np.testing.assert_allclose(
        np.where(MASK[..., None], made.logits(IDS, MASK), 0),
        np.where(MASK[..., None], model.logits(IDS, MASK), 0),
        rtol=1e-4,
        atol=1e-5,
    )
    found, expected = by_decoder(made), by_decoder(model)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    close(found[1]["inner"], expected[1])
    state = create_state(made, optax.sgd(1e-2))
    assert state.params["inner"].keys() == model.params.keys()


@pytest.mark.parametrize("kind", [Small, Cached])
def test_the_kit_finds_nothing(kind: Any) -> None:
    check_model(nnx_family("small", kind), SIZES)


def test_a_cache_of_the_module_s_own_is_used() -> None:
    definition = nnx_family("small", Cached).define(SIZES, "lm")
    params = definition.init(jax.random.key(0))
    at = jnp.arange(4)[None]
    _, cache = definition.prefill(params, jnp.asarray(IDS[:1]), at, jnp.full((1, 4), 4))
    assert jax.tree.map(jnp.shape, cache) == {"k": (1, 4, 16), "v": (1, 4, 16)}


@pytest.mark.parametrize("kind", [Small, Cached])
def test_a_flax_model_is_saved_loaded_and_sampled_greedily(kind: Any, tmp_path: Path) -> None:
    module = kind(SIZES, nnx.Rngs(2))
    model = nnx_model(module, config=SIZES)
    model.save(tmp_path)
    family = nnx_family("small", kind)
    registry: Any = SimpleNamespace(get=lambda kind, name: family, names=lambda kind: ["small"])
    again = load_model(tmp_path, registry=registry)
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)

    lengths = {"max_completion_length": 4, "max_prompt_length": 4}
    given = samplers.inputs(
        again.definition, again.mesh, stop_ids=(), temperature=0.0, prompts_per_call=2, **lengths
    )
    sampler = Sampler(given)
    prompts = [IDS[0], IDS[1, :2]]
    rollouts = sampler(again.params, prompts, jax.random.key(0))
    at = jnp.arange(12)
    for prompt, tokens in zip(prompts, rollouts.tokens, strict=True):
        ids = list(prompt)
        for _ in range(4):
            row = jnp.asarray([[*ids, *[0] * 12][:12]])  # of one length: nothing compiles again
            ids.append(int(module(row, at[None], (at <= at[:, None])[None])[0, len(ids) - 1].argmax()))
        assert ids[len(prompt) :] == tokens.tolist()


def test_modules_that_cannot_be_models_are_refused() -> None:
    class NoMask(Small):
        def __call__(self, input_ids: Any) -> Any:  # type: ignore[override]
            return input_ids

    class Noisy(Small):
        def __init__(self, config: Any, rngs: nnx.Rngs) -> None:
            super().__init__(config, rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

    class Half(Small):
        def __init__(self, config: Any, rngs: nnx.Rngs) -> None:
            super().__init__(config, rngs)
            self.words = nnx.Embed(31, 16, rngs=rngs, param_dtype=jnp.bfloat16)

    def define(kind: Any, head: Any = "lm") -> Definition:
        return nnx_family("small", kind).define(SIZES, head)

    for kind, words in (
        (NoMask, r"must take \(input_ids, positions, attention_mask\)"),
        (Noisy, r"'dropout\.rngs\.\w+\.?\w*' is no nnx\.Param"),
        (Half, r"'words\.embedding' is bfloat16"),
    ):
        with pytest.raises(InputError, match=words):
            define(kind)

    class Scores(WithHidden):
        def __init__(self, config: Any, rngs: nnx.Rngs) -> None:
            super().__init__(config, rngs)
            self.score = nnx.Linear(16, 1, rngs=rngs)

    with pytest.raises(
        InputError, match=r"^Small: it has no method hidden\(input_ids, positions, attention_mask\)"
    ):
        define(Small, "score")
    with pytest.raises(
        InputError, match=r"^Scores: it has a part called 'score', which is the name of the reward"
    ):
        define(Scores, "score")


def test_a_module_with_hidden_states_is_a_reward_model(tmp_path: Path) -> None:
    family = nnx_family("small", WithHidden)
    registry: Any = SimpleNamespace(get=lambda kind, name: family, names=lambda kind: ["small"])
    nnx_model(WithHidden(SIZES, nnx.Rngs(2)), config=SIZES).save(tmp_path / "lm")
    with pytest.warns(UserWarning, match="head"):  # which is new
        model = load_model(tmp_path / "lm", "score", registry=registry)
    module = WithHidden(SIZES, nnx.Rngs(2))
    kernel = np.asarray(model.params["score"]["kernel"], np.float64)
    scores = model.scores(IDS, MASK)
    for row, (ids, used) in enumerate(zip(IDS, MASK.sum(1), strict=True)):
        at = jnp.arange(used)
        hidden = module.hidden(jnp.asarray(ids[None, :used]), at[None], (at <= at[:, None])[None])
        expected = np.asarray(hidden, np.float64)[0, -1] @ kernel[:, 0]
        np.testing.assert_allclose(scores[row], expected, rtol=1e-5)
    left = np.array([IDS[0], np.roll(IDS[1], 1)]), np.array([MASK[0], np.roll(MASK[1], 1)])
    np.testing.assert_allclose(model.scores(*left), scores, rtol=1e-5)
    model.save(tmp_path / "rm")
    again = load_model(tmp_path / "rm", "score", registry=registry)
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    half = load_model(tmp_path / "rm", "score", registry=registry, dtype="bfloat16")
    np.testing.assert_allclose(half.scores(IDS, MASK), scores, rtol=0.1, atol=0.02)
    assert (np.asarray(half.scores(IDS, MASK)) != np.asarray(scores)).any()
