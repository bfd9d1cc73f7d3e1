"""Find where outputs that are not finite begin: in a tensor of the weights, or in the output of a layer.

Nothing here runs before such an output was seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_core.errors import SHOWN, InputError, NonFiniteError
from rlhf_core.mesh import fetch_array
from rlhf_core.models.decoder import Decoder
from rlhf_core.models.params import paths
from rlhf_core.models.weights import tensor_names

TRIED = 8
"""Sequences that are computed again by themselves."""
CHUNK = 64
"""Tokens whose logits are computed together."""


def nonfinite_output_error(
    definition: Any, params: Any, source: Any, outputs: Mapping[int, tuple[str, Any]]
) -> InputError | NonFiniteError:
    """Make the error for outputs that are not finite.

    source: the model's directory or name. outputs: {number: (what is not finite, such as "the score of row 3"; the
    tokens that it was computed from, int [n])}. Returns an InputError that names the tensors where weights are not
    finite, else an error that names the first layer whose output is not, for a sequence that has such an output by
    itself: sequences that share a row with it have them too.
    """
    first = next(iter(outputs))
    begins = ""
    problem = nonfinite_weights(definition, params)
    if problem:
        return InputError(f"{source}: its outputs are not finite (NaN or infinite): {problem}")
    for number in list(outputs)[:TRIED]:
        tokens = jnp.asarray(outputs[number][1], jnp.int32)[None]
        count = tokens.shape[1]
        begins = first_nonfinite(
            definition, params, tokens, jnp.arange(count)[None], jnp.full_like(tokens, count)
        )
        if begins:
            first = number
            break
    return NonFiniteError(
        f"{source}: {outputs[first][0]} is not finite (NaN or infinite), though all weights of the model are. "
        + (
            f"It begins in the output of {begins}, whose values are too large: "
            if begins
            else "Computed by itself it is finite: "
        )
        + "use an earlier checkpoint of the model, or leave this text out",
        first,
    )


def nonfinite_weights(definition: Any, params: Any) -> str:
    """Describe the tensors of the weights that are not finite, by their names in the files; "" where all are finite.

    definition: of one model, or a mapping of several by name, as `params` is then.
    """
    several = definition.items() if isinstance(definition, Mapping) else [("", definition)]
    found = [
        f"{f'{model}: ' if model else ''}'{name}' holds {count:,} of {size:,} that are NaN or infinite"
        for model, each in several
        for name, count, size in _nonfinite_tensors(each, params[model] if model else params)
    ]
    if not found:
        return ""
    more = f", and so do {len(found) - SHOWN} other tensors" if len(found) > SHOWN else ""
    return f"the model's weights are not: {', '.join(found[:SHOWN])}{more}; fetch, restore or train the model again"


def _nonfinite_tensors(definition: Any, params: Any) -> Iterator[tuple[str, int, int]]:
    """Yield (tensor, values that are not finite, values)."""
    known = tensor_names(definition) if isinstance(definition, Decoder) else {}
    for path, leaf in paths(params):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        names = known.get(path, np.array(".".join(path), object))
        counts = fetch_array(_count(leaf, names.ndim))
        for index in np.argwhere(counts):
            place = tuple(index.tolist())
            yield str(names[place]), int(counts[place]), leaf.size // max(counts.size, 1)


def _count(x: jax.Array, lead: int) -> jax.Array:
    return jnp.sum(~jnp.isfinite(x), axis=tuple(range(lead, x.ndim)))


def first_nonfinite(definition: Any, params: Any, tokens: Any, positions: Any, visible_until: Any) -> str:
    """Name the first part of a model whose output for rows, int32 [rows, time], is not finite; "" where all are.

    definition: of one model, or a mapping of several by name, as `params` is then.
    """
    if isinstance(definition, Mapping):
        found = (
            (name, first_nonfinite(each, params[name], tokens, positions, visible_until))
            for name, each in definition.items()
        )
        return next((f"{name}: {part}" for name, part in found if part), "")
    batch = params, tokens, positions, visible_until
    if isinstance(definition, Decoder):
        outputs = list(definition.layer_outputs(*batch))
    else:
        outputs = [("its layers", definition.hidden(*batch))]
    for name, states in outputs:
        if not _finite(states):
            return name
    if definition.head == "score":
        return "" if _finite(definition.score(params, states)) else "its reward head"
    for start in range(0, states.shape[1], CHUNK):  # the logits of all tokens may be larger than the model
        if not _finite(definition.logits(params, states[:, start : start + CHUNK])):
            return "its head, the logits"
    return ""


def _finite(x: jax.Array) -> bool:
    return bool(jnp.isfinite(x).all())
