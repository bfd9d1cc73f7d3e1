"""Names of EasyDeL's and TRL's configs, for trainers that know only their own.

A config written for EasyDeL is accepted unchanged: `rlhf_compat.easydel`. TRL's names are errors that say what to
write, since their values and defaults differ: `rlhf_compat.trl`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from rlhf_compat import easydel, trl
from rlhf_compat.easydel import FIELDS as FIELDS
from rlhf_compat.easydel import NOTHING as NOTHING
from rlhf_compat.easydel import RULES as RULES
from rlhf_compat.trl import HERE as HERE
from rlhf_compat.trl import LORA as LORA
from rlhf_core import Alias, NoEffect, Options, Refused, TrainerConfig, hookimpl

Answer = Alias | Sequence[Alias] | NoEffect | Refused


@hookimpl
def rlhf_translate(
    config_class: type[Options], unknown: Mapping[str, Any], given: Mapping[str, Any], base: Any
) -> dict[str, Answer]:
    """Say what fields of EasyDeL's and TRL's configs mean."""
    if issubclass(config_class, TrainerConfig):
        return {
            **trl.translate(config_class, unknown),
            **easydel.translate(config_class, unknown, given, base),
        }
    if config_class in get_args(TrainerConfig.model_fields["lora"].annotation):
        return {name: Refused(path) for name, path in LORA.items() if name in unknown}
    return {}
