"""Describe pipeline files as a JSON schema, for editors: what the installed plugins register, with their options.

Draft 7, which taplo (the language server for TOML of VS Code, Zed, Neovim and others) reads. It refuses what cannot be
right wherever the file is: unknown fields, wrong types, values out of range, unknown components and options. What
depends on other files or on several fields is left to `rlhf check`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BeforeValidator, SecretStr
from pydantic.fields import FieldInfo

from rlhf_core.config import Component, Options, TrainerConfig
from rlhf_core.config.trainer import path_text
from rlhf_core.contracts import TRAINER, Kind
from rlhf_core.mesh import AXES
from rlhf_core.plugins.registry import Registry

Schema = dict[str, Any]
TYPES: Mapping[Any, str] = {bool: "boolean", int: "integer", float: "number", str: "string", Path: "string"}
BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
ENVIRONMENT = {
    "type": "object",
    "properties": {"env": {"type": "string"}},
    "required": ["env"],
    "additionalProperties": False,
}


def pipeline_schema(registry: Registry) -> Schema:
    """Return the schema of pipeline files for the trainers and components of a registry."""
    found = Schemas(registry)
    names = list(registry.names(TRAINER))
    choices = [
        when("trainer", name, {"$ref": f"#/definitions/{name}_stage"}) for name in names if found.stage(name)
    ]
    stage = {
        "type": "object",
        "required": ["name", "trainer"],
        "properties": {"name": NAME, "trainer": {"type": "string", "enum": names}},
        "allOf": choices,
    }
    axes = {axis: {"type": "integer", "minimum": -1, "not": {"const": 0}} for axis in AXES}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "rlhf pipeline",
        "type": "object",
        "required": ["stage"],
        "additionalProperties": False,
        "properties": {
            "dir": {
                "type": "string",
                "description": "run directory, relative to the current one; --dir overrides it",
            },
            "seed": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1, "default": 0},
            "mesh": {
                "type": "object",
                "description": "devices by axis; -1: all that remain",
                "properties": axes,
                "additionalProperties": False,
            },
            "stage": {"type": "array", "minItems": 1, "items": stage},
        },
        "definitions": dict(sorted(found.definitions.items())),
    }


NAME: Schema = {
    "type": "string",
    "pattern": "^[A-Za-z0-9_][A-Za-z0-9_-]*$",
    "description": "of the stage; its outputs are NAME.OUTPUT",
}


class Schemas:
    """Makes the definitions that stages refer to."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.definitions: dict[str, Schema] = {}

    def stage(self, trainer: str) -> str:
        """Define a stage of a trainer; return the definition's name."""
        config: type[TrainerConfig] = self.registry.get(TRAINER, trainer).config
        properties = {name: self.field(field) for name, field in config.model_fields.items()}
        for name, path in config.aliases().items():
            if name not in properties:
                properties[name] = {**self.alias(config, path), "description": f"another name of {path}"}
        properties |= {"name": NAME, "trainer": {"const": trainer}}
        name = f"{trainer}_stage"
        about = (config.__doc__ or "").strip().split("\n\n")[0]
        self.definitions[name] = closed(properties, ["name", "trainer"]) | {
            "description": " ".join(about.split())
        }
        return name

    def alias(self, config: type[Options], path: str) -> Schema:
        """Return the schema of a field that a dotted path names, or of anything where it is a component's option."""
        name, _, rest = path.partition(".")
        field = config.model_fields.get(name)
        if field is None:
            return {}
        if not rest:
            return self.field(field)
        inner = next(
            (each for each in tables(field.annotation) if rest.partition(".")[0] in each.model_fields), None
        )
        return {} if inner is None else self.alias(inner, rest)

    def field(self, field: FieldInfo) -> Schema:
        """Return the schema of a field, with its default and description."""
        kinds = [note for note in field.metadata if isinstance(note, Kind)]
        schema = self.typed(Annotated[(field.annotation, *kinds)] if kinds else field.annotation)
        schema = with_texts(bounded(schema, field.metadata), field.metadata)
        default = field.get_default(call_default_factory=True)
        default = default.to_dict() if isinstance(default, Options) else default
        if isinstance(default, bool | int | float | str):
            schema = {**schema, "default": default}
        return {**schema, "description": field.description} if field.description else schema

    def typed(self, annotation: Any) -> Schema:
        """Return the schema of a type."""
        origin, arguments = get_origin(annotation), get_args(annotation)
        if origin is Annotated:
            return self.annotated(arguments[0], arguments[1:])
        if origin is Literal:
            return {"enum": list(arguments)}
        if origin in (Union, UnionType):
            return either([self.typed(arm) for arm in arguments if arm is not NoneType])
        if origin in (list, tuple, set, frozenset, Sequence):
            items = self.typed(arguments[0]) if arguments else {}
            array = {"type": "array", "items": items}
            if "$ref" in items:
                return either([array, items])  # one component may stand for a list of it
            return array
        if isinstance(annotation, type) and issubclass(annotation, Options):
            properties = {name: self.field(field) for name, field in annotation.model_fields.items()}
            required = [name for name, field in annotation.model_fields.items() if field.is_required()]
            return closed(properties, required)
        if origin in (dict, Mapping):
            return {"type": "object"}
        if annotation is SecretStr:
            return {"type": "string"}
        if annotation in TYPES:
            return {"type": TYPES[annotation]}
        return {}

    def annotated(self, annotation: Any, notes: Sequence[Any]) -> Schema:
        """Return the schema of a type with notes: of a component, if one of them is its kind."""
        for note in notes:
            if isinstance(note, Kind):
                return self.component(note, annotation)
        limits = [part for note in notes for part in parts(note)]
        return with_texts(bounded(self.typed(annotation), limits), notes)

    def component(self, kind: Kind[Any], owner: type[Component]) -> Schema:
        """Return the schema of a component: a name, or a table with the name, the owner's fields and the options."""
        key = kind.name.replace(" ", "_")  # a space is no part of an address: taplo refuses the whole schema
        key = key if owner is Component else f"{key}_of_{owner.__name__}"
        if key not in self.definitions:
            own = {name: self.field(field) for name, field in owner.model_fields.items() if name != "name"}
            names = list(self.registry.names(kind))
            usual = owner.model_fields["name"].default
            texts = [{"type": "string", "enum": names}]
            if kind.by_path:
                texts.append(
                    {"type": "string", "pattern": ":", "description": "module:function or file.py:function"}
                )
            choices = []
            for name in names:
                entry = self.registry._entry(kind, name)
                options = {each: self.option(model) for each, model in (entry.options or {}).items()}
                required = sorted(entry.required)
                if name != usual:
                    required.append("name")
                table = closed({**options, **own, "name": {"const": name}}, required)
                choices.append(when("name", name, table, absent=name == usual))
            named = {"type": "object", "properties": {"name": either(texts)}, "allOf": choices}
            if not isinstance(usual, str):
                named["required"] = ["name"]
            self.definitions[key] = {"anyOf": [*texts, named]}
        return {"$ref": f"#/definitions/{key}"}

    def option(self, model: type[Options]) -> Schema:
        """Return the schema of a component's option, which may be read from the environment where it is a text."""
        schema = self.field(model.model_fields["value"])
        return either([schema, ENVIRONMENT]) if takes_text(schema) else schema


def tables(annotation: Any) -> Iterable[type[Options]]:
    """Yield the tables that a field of this type may hold."""
    if isinstance(annotation, type) and issubclass(annotation, Options):
        yield annotation
    for each in get_args(annotation):
        yield from tables(each)


def takes_text(schema: Schema) -> bool:
    return schema.get("type") == "string" or any(map(takes_text, schema.get("anyOf", ())))


def parts(note: Any) -> list[Any]:
    return list(note.metadata) if isinstance(note, FieldInfo) else [note]


def bounded(schema: Schema, notes: Iterable[Any]) -> Schema:
    """Add the limits of a number."""
    limits = {
        word: getattr(note, name)
        for note in notes
        for name, word in BOUNDS.items()
        if isinstance(getattr(note, name, None), int | float)
    }
    return {**schema, **limits}


def closed(properties: Schema, required: Sequence[str]) -> Schema:
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": list(required)} if required else schema


def with_texts(schema: Schema, notes: Iterable[Any]) -> Schema:
    """Take texts, too, where a type reads some of its own, such as 2h30m."""
    if any(isinstance(note, BeforeValidator) and note.func is not path_text for note in notes):
        return either([schema, {"type": "string"}])
    return schema


def either(schemas: Sequence[Schema]) -> Schema:
    """Return a schema for what fits one of several; nothing is refused where one takes anything."""
    if len(schemas) == 1:
        return schemas[0]
    return {} if {} in schemas else {"anyOf": list(schemas)}


def when(key: str, value: str, then: Schema, *, absent: bool = False) -> Schema:
    """Return a schema for tables whose key has this value, or where `absent` no value."""
    test: Schema = {"type": "object", "properties": {key: {"const": value}}}
    return {"if": test if absent else {**test, "required": [key]}, "then": then}
