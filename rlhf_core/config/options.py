"""The base of every configuration class, and the component: a name with options.

Strict: text is never read as a number, true is never 1; a whole number does where a number is wanted, and
a list where a tuple is, since files know no tuples.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema

from rlhf_core.config.problems import Problem, explain, raise_or_warn
from rlhf_core.errors import InputError


def _plain(value: Any) -> Any:
    """Options as a file would hold them, so that a config equals its copy read from JSON."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    return value


def _accept_lists(schema: Any) -> None:
    """Let lists through where a schema wants a tuple or a set, and text where a path; items stay strict."""
    if isinstance(schema, list | tuple):
        for item in schema:
            _accept_lists(item)
    elif isinstance(schema, dict):
        if schema.get("type") in ("tuple", "set", "frozenset", "lax-or-strict"):
            schema["strict"] = False
        for key, item in schema.items():
            if key not in ("default", "expected", "metadata"):
                _accept_lists(item)


class Options(BaseModel):
    """A frozen, strict table of options; extend it and annotate fields.

    Raises InputError, one line a problem, when built with something that does not fit.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        arbitrary_types_allowed=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    ELSEWHERE: ClassVar[Mapping[str, str]] = {}
    """{another library's name: ours}, for the message that a name is unknown."""
    ABSENT: ClassVar[Mapping[str, str]] = {}
    """{another library's name: what happens here}, for the same message where there is nothing like it."""

    def __init__(self, /, **data: Any) -> None:
        given, problems = self._expand(data)
        try:
            super().__init__(**given)
        except ValidationError as error:
            problems += explain(type(self), error, given)
        raise_or_warn(problems, type(self).__name__)

    # pydantic then builds nested tables without this, so that their problems are collected with the others.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _accept_lists(schema)
        return schema

    @classmethod
    def _expand(
        cls, data: Mapping[str, Any], base: Self | None = None
    ) -> tuple[dict[str, Any], list[Problem]]:
        """The canonical form of what was given, and what is wrong with it already, or to be said of it.

        base: what it will be merged into; None: the defaults.
        """
        return dict(data), []

    @classmethod
    def names(cls) -> list[str]:
        """Every name that may be given."""
        return list(cls.model_fields)

    def to_dict(self) -> dict[str, Any]:
        """Every field, nested, of types that JSON has."""
        return self.model_dump(mode="json")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """What `to_dict` gave, or part of it; raises InputError."""
        return cls(**data)

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return self.model_dump_json(indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`; raises InputError."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"{cls.__name__}: not JSON: {error}") from None
        if not isinstance(data, dict):
            raise InputError(f"{cls.__name__}: expected a JSON object, got {type(data).__name__}")
        return cls(**data)

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed; raises InputError."""
        given, problems = self._expand(changes, self)
        raise_or_warn(problems, type(self).__name__)
        return type(self)(**{**self._table(), **given})

    def _table(self, *, only_set: bool = False) -> dict[str, Any]:
        """Field by field, one level deep; only_set: without those left at their defaults."""
        names = type(self).model_fields
        return {name: getattr(self, name) for name in names if not only_set or name in self.model_fields_set}


class Component(Options):
    """A component by name, `{ name = "dapo", epsilon = 0.2 }`; just "dapo" where it needs no options.

    A field says which kind it holds: `loss: Annotated[Component, POLICY_LOSS] = Component(name="dapo")`. The
    options are checked by `build`, with a registry. What a trainer takes in the same table, and the component
    does not, is a field of a subclass: `class WeightedReward(Component): weight: float = 1.0`.
    """

    model_config = ConfigDict(extra="allow")
    name: str

    @model_validator(mode="before")
    @classmethod
    def _canonical(cls, given: Any) -> Any:
        if isinstance(given, str):
            return {"name": given}
        if isinstance(given, Mapping):
            return {key: _plain(value) for key, value in given.items()}
        return given

    @property
    def options(self) -> dict[str, Any]:
        """What the component itself is given: everything but the declared fields."""
        return dict(self.__pydantic_extra__ or {})

    def _table(self, *, only_set: bool = False) -> dict[str, Any]:
        return {**super()._table(only_set=only_set), **self.options}
