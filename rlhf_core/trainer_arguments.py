"""The arguments of a trainer class, with the names that users of other libraries type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from rlhf_core.errors import InputError, near
from rlhf_core.options.seed import OTHER_NAMES, TRL_NAMES

if TYPE_CHECKING:
    from rlhf_core.options import TrainerConfig

C = TypeVar("C", bound="TrainerConfig")
SPELLINGS = {
    "arguments": "config",
    "args": "config",
    "processing_class": "tokenizer",
    "reward_funcs": "rewards",
}
INPUTS = ("model", "train_dataset", "eval_dataset", "tokenizer", "rewards", "callbacks")
"""What a trainer class is handed beside its config."""


def door_inputs(cls: type[C], config: C | None, inputs: dict[str, Any]) -> tuple[C, dict[str, Any]]:
    """A trainer class's arguments, with the other spellings that users of other libraries type.

    Raises InputError for a name nobody knows or given twice, TypeError for a config of another class.
    """
    inputs = dict(inputs)
    for spelling, name in SPELLINGS.items():
        if spelling not in inputs:
            continue
        value = inputs.pop(spelling)
        if name == "config":
            if config is not None and value is not None:
                raise InputError(f"{spelling}: the config is given twice")
            config = value if config is None else config
        elif inputs.get(name) is not None:
            raise InputError(f"{spelling}: {name} is given twice")
        else:
            inputs[name] = value
    config = cls() if config is None else config
    if not isinstance(config, cls):
        raise TypeError(f"config: expected a {cls.__name__}, got {type(config).__name__}")
    if callable(inputs.get("rewards")) or isinstance(inputs.get("rewards"), str):
        inputs["rewards"] = [inputs["rewards"]]
    if unknown := sorted(set(inputs) - set(INPUTS)):
        raise InputError(
            *(
                f"{name}: unknown argument of the trainer of {cls.__name__}{_meant(name, cls)}"
                for name in unknown
            )
        )
    return config, inputs


def _meant(name: str, cls: type[TrainerConfig]) -> str:
    ours = {**OTHER_NAMES, **TRL_NAMES}.get(name, name).partition(".")[0]
    if ours in INPUTS:
        return f"; write {ours}"
    if ours in cls.names():
        return f"; it is a field of the config: {cls.__name__}({ours}=…)"
    return f".{near(name, INPUTS)} Arguments: config, {', '.join(INPUTS)}"
