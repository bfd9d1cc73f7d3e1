"""The decoder's functions as a component of the kind MODEL."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from rlhf_core.contracts import ModelFamily
from rlhf_core.models import decoder, weights
from rlhf_core.models.families import ARCHITECTURES, Architecture
from rlhf_core.models.hf_config import parse


def decoder_family(architectures: Mapping[str, Architecture]) -> ModelFamily:
    """Make the family of the models in `architectures`, by the `model_type` of their config.json.

    A package that describes such models registers them: registry.add(MODEL, "name", decoder_family({...})).
    """
    return ModelFamily(
        name=tuple(architectures),
        parse=functools.partial(parse, architectures=architectures),
        abstract=decoder.abstract,
        axes=decoder.axes,
        init=decoder.init,
        hidden=decoder.hidden,
        hidden_at=decoder.hidden_at,
        unembedding=decoder.unembedding,
        score=decoder.score,
        prefill=decoder.prefill,
        ring=decoder.ring,
        prepare=decoder.prepare,
        decode=decoder.decode,
        load=weights.load,
        save=weights.save,
        adapt=decoder.adapt,
        tensor_parallel=decoder.TENSOR_PARALLEL,
        decode_groups=decoder.decode_groups,
        extend=decoder.extend,
    )


DECODER = decoder_family(ARCHITECTURES)
"""The families that core itself describes."""
