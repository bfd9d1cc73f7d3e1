"""Names of other libraries: what a plugin's `rlhf_translate` answers for a key, and whom configurations ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlhf_core.contracts import Kind
from rlhf_core.runtime.distributions import REGISTRY, find_points

INSTALL = "Names of TRL and EasyDeL come with `pip install rlhf-compat`"
"""What a message on an unknown field says where nothing that is installed translates names."""


@dataclass(frozen=True)
class Alias:
    """Another name of a field.

    path: of the field, or of an entry of its table, dotted: "max_grad_norm", "loss.epsilon"; in a list of components by
        their names, "logger.wandb.entity".
    value: the field's value, made from the one that was typed.
    wins: whether it goes before a whole field, where both are given; else they must agree.
    """

    path: str
    value: Any
    wins: bool = False


@dataclass(frozen=True)
class NoEffect:
    """A name that is accepted and changes nothing.

    why: what happens instead, for a warning; empty where the value asks for what happens anyway.
    """

    why: str = ""


@dataclass(frozen=True)
class Refused:
    """A name that is an error.

    write: the dotted path of the field to write instead, or a sentence on what is wrong and what to do.
    """

    write: str

    @property
    def message(self) -> str:
        """What is said of the name."""
        return self.write if " " in self.write else f"unknown field. Here it is {self.write}"


Answer = Alias | Sequence[Alias] | NoEffect | Refused
"""What a name means; a name may stand for several fields."""


class Names(Protocol):
    """The part of a registry that configurations need."""

    def check(
        self, kind: Kind[Any], name: str, options: Mapping[str, Any], /, *, also: Sequence[str] = ()
    ) -> list[tuple[str, str]]:
        """List what is wrong with a name and its options, as (dotted path below the component, message).

        also: names that the trainer takes in the same table, which a misspelt option may mean.
        """
        ...

    def translate(
        self, config_class: type[Any], unknown: Mapping[str, Any], given: Mapping[str, Any], base: Any, /
    ) -> Mapping[str, Answer] | None:
        """Ask plugins what keys mean that a class does not know, as `rlhf_translate`; None: no plugin translates."""
        ...


def installed() -> Names | None:
    """Open the registry of everything that is installed, which lies above; None where rlhf-core itself is not.

    An entry point of rlhf-core opens it.
    """
    for point in find_points(REGISTRY):
        registry: Names = point.load()()
        return registry
    return None
