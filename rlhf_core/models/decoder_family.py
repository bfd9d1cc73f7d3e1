"""The decoder as a component of the kind MODEL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core.contracts import ModelFamily
from rlhf_core.contracts.models import Head
from rlhf_core.models.decoder import Decoder
from rlhf_core.models.families import ARCHITECTURES, Architecture
from rlhf_core.models.hf_config import parse


def decoder_family(architectures: Mapping[str, Architecture]) -> ModelFamily:
    """Make the family of the models in `architectures`, by the `model_type` of their config.json.

    A package that describes such models registers them: registry.add(MODEL, "name", decoder_family({...})).
    """

    def define(hf_config: Mapping[str, Any], head: Head) -> Decoder:
        return Decoder(config=parse(hf_config, architectures), head=head)

    return ModelFamily(tuple(architectures), define)


DECODER = decoder_family(ARCHITECTURES)
"""The families that core itself describes."""
