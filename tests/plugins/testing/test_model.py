"""The kit for model families finds each defect; the built-in one has none."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_core import ModelFamily
from rlhf_core.models import DECODER, Decoder, Definition, find_family
from rlhf_core.testing import check_model
from tests.shared import mesh_cases as cases
from tests.shared.decoder_configs import defined

FAMILIES = ("llama", "gemma2", "mixtral")
ONE_LAYER = cases.FAMILIES["llama"] | {"num_hidden_layers": 1}
"""One layer suffices for the kit to find a defect, and compiles in half the time of two."""
STATES = ONE_LAYER | {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
}


def changed(**methods: Any) -> ModelFamily:
    if "hidden" in methods:
        methods.setdefault("hidden_at", Definition.hidden_at)
    kind: Any = type("Changed", (Decoder,), methods)

    def define(hf_config: Any, head: Any) -> Any:
        return kind(config=defined(hf_config, head).config, head=head)  # type: ignore[attr-defined]

    return ModelFamily(DECODER.name, define)


@functools.cache
def of_numpy(model: Any) -> Any:
    draw = np.random.default_rng(0)
    return jax.tree.map(lambda x: draw.normal(0, 0.3, x.shape).astype(np.float32), model.abstract_params())


def drawn(model: Any, key: Any) -> Any:
    """Parameters that are there already: the kit would compile for every family how they are drawn."""
    return jax.tree.map(jnp.asarray, of_numpy(model))


def half(model: Any, key: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), drawn(model, key))


def unnamed(model: Any) -> Any:
    return Decoder.logical_axes(model) | {"norm": {"scale": ()}}


def infinite(model: Any, params: Any, tokens: Any, *where: Any) -> Any:
    return Decoder.hidden(model, params, tokens, *where) / 0


def counting_places(model: Any, params: Any, tokens: Any, *where: Any) -> Any:
    """Use positions in the row in place of those in the sequence."""
    states = Decoder.hidden(model, params, tokens, *where)
    return states + 0.1 * jnp.maximum(jnp.arange(tokens.shape[1]) - 6, 0)[None, :, None]


def seeing_the_row(model: Any, params: Any, tokens: Any, positions: Any, until: Any) -> Any:
    """See all earlier tokens of the row, even of other sequences."""
    return Decoder.hidden(model, params, tokens, positions, jnp.where(until > 0, tokens.shape[1], 0))


def seeing_the_end(model: Any, params: Any, tokens: Any, *where: Any) -> Any:
    states = Decoder.hidden(model, params, tokens, *where)
    return states + 0.1 * jnp.tanh(states.sum(1, keepdims=True))


def the_next(model: Any, *given: Any) -> Any:
    return Decoder.hidden_at(model, *given[:-1], given[-1] + 1)


def other_decode(model: Any, *given: Any) -> Any:
    hidden, cache = Decoder.decode(model, *given)
    return 1.01 * hidden, cache


def other_groups(model: Any, *given: Any) -> Any:
    hidden, cache = Decoder.decode_groups(model, *given)
    return 1.01 * hidden, cache


def other_extension(model: Any, params: Any, cache: Any, tokens: Any, start: Any) -> Any:
    return Decoder.extend(model, params, cache, tokens, start + 1)


def column(model: Any, params: Any, hidden: Any) -> Any:
    return Decoder.score(model, params, hidden)[..., None]


def rounded(model: Any, params: Any, directory: Any, dtype: str) -> None:
    Decoder.save(model, params, directory, "bfloat16")


ONE_OF_EACH = changed(
    init=drawn,
    hidden=counting_places,
    hidden_at=the_next,
    decode_groups=other_groups,
    score=column,
    save=rounded,
)
"""Several defects, of which the kit finds each; `make test` looks for them in one go."""
MUTANTS: dict[str, tuple[set[str], Any]] = {
    "no family": ({"component"}, Decoder.init),
    "half": ({"parameters"}, changed(init=half)),
    "unnamed": ({"parameters"}, changed(init=drawn, logical_axes=unnamed)),
    "infinite": ({"finite"}, changed(init=drawn, hidden=infinite)),
    "one of each": (
        {"padding", "packing", "some tokens", "cache", "score", "saving"},
        ONE_OF_EACH,
    ),
    "counting places": ({"padding", "packing"}, changed(hidden=counting_places)),
    "seeing the row": ({"packing"}, changed(hidden=seeing_the_row)),
    "seeing the end": (
        {"padding", "packing", "later tokens", "cache"},
        changed(init=drawn, hidden=seeing_the_end),
    ),
    "the next": ({"some tokens"}, changed(hidden_at=the_next)),
    "another decode": ({"cache"}, changed(decode=other_decode)),
    "other groups": ({"cache"}, changed(decode_groups=other_groups)),
    "other extension": ({"cache"}, changed(extend=other_extension)),
    "column": ({"score"}, changed(score=column)),
    "rounded": ({"saving"}, changed(save=rounded)),
}


AT_ONCE = ("no family", "half", "unnamed", "infinite", "one of each", "seeing the end")


@pytest.mark.parametrize(
    "case", [case if case in AT_ONCE else pytest.param(case, marks=pytest.mark.long) for case in MUTANTS]
)
def test_the_defect_is_found(case: str, failures: Any) -> None:
    expected, family = MUTANTS[case]
    assert set(found := failures(check_model, family, ONE_LAYER)) == expected, found


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(ONE_LAYER, id="one layer"),
        *(pytest.param(cases.FAMILIES[name], id=name, marks=pytest.mark.long) for name in FAMILIES),
        pytest.param(STATES, id="states", marks=pytest.mark.long),
    ],
)
def test_the_built_in_decoder_passes(config: Any) -> None:
    check_model(find_family(config["model_type"]), config)
