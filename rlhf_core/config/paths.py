"""Recognize the configuration fields that name files and models, by the names of the fields."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

INPUT_FIELDS = {"chat_template", "tokenizer", "path"}
INPUT_ENDINGS = ("_data", "_file")


def is_input_field(field: str) -> bool:
    """Check whether strings in this field may be paths, as in a trainer's own `replay_data` or `words_file`."""
    return field in INPUT_FIELDS or field.endswith(INPUT_ENDINGS) or is_model_field(field)


def is_written(dotted: str) -> bool:
    """Check whether the field at a dotted path names a directory that is written, not read."""
    return f".{dotted}".endswith((".save_directory", ".sampler.directory"))


def only_measures(dotted: str) -> bool:
    """Check whether the field at a dotted path names functions that measure, and so change nothing that is trained."""
    return dotted.startswith("metrics[")


def is_model_field(field: str) -> bool:
    """Check whether strings in this field name models, as in `model` itself or a plugin's `teacher_model`."""
    return field == "model" or field.endswith("_model")


def names_remote_model(field: str, table: Mapping[str, Any]) -> bool:
    """Check whether a field of a table names a model at the table's `url` or `urls`: neither a path nor an artifact."""
    return field == "model" and not table.keys().isdisjoint(("url", "urls"))


def split_file_name(name: str) -> tuple[str, str] | None:
    """Split `file.py:function` into file and function; None for any other name."""
    file, colon, function = name.rpartition(":")  # a directory may have a colon, too
    return (file, function) if colon and file.endswith(".py") else None


class ArtifactKinds:
    """Declare which kinds of artifact a configuration field or an option takes.

    `critic_model: Annotated[str | None, ArtifactKinds("language_model", "reward_model")] = None`. A pipeline that names
    an artifact of another kind there is refused before anything runs.
    """

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds


USUAL_KINDS = {
    "reward_model": "reward_model",
    "critic_model": "reward_model",
    "value_model": "reward_model",
    "ref_model": "language_model",
    "reference_model": "language_model",
    "teacher_model": "language_model",
    "draft_model": "language_model",
}
"""The kind that a field without `ArtifactKinds` takes by its name; fields of other names take any."""


def artifact_kinds(cls: type[BaseModel], path: str) -> tuple[str, ...]:
    """Return the kinds of artifact that the field at a dotted path takes; empty if it takes any."""
    *tables, last = re.sub(r"\[\d+\]", "", path).split(".")
    inner: type[BaseModel] | None = cls
    for name in tables:
        field = None if inner is None else inner.model_fields.get(name)
        inner = None if field is None else table_in(field.annotation)
    field = None if inner is None else inner.model_fields.get(last)
    kinds = () if field is None else noted_kinds(field)
    if kinds:
        return kinds
    return (USUAL_KINDS[last],) if last in USUAL_KINDS else ()


def noted_kinds(field: FieldInfo) -> tuple[str, ...]:
    """Return the kinds in a field's `ArtifactKinds`; empty without one."""
    notes = [*field.metadata, *_notes_in(field.annotation)]
    return next((note.kinds for note in notes if isinstance(note, ArtifactKinds)), ())


def _notes_in(annotation: Any) -> list[Any]:
    notes = list(get_args(annotation)[1:]) if get_origin(annotation) is Annotated else []
    return notes + [note for part in get_args(annotation) for note in _notes_in(part)]


def table_in(annotation: Any) -> Any:
    """Find the class of a table inside an annotation such as `list[X] | None`; None if there is none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(table_in, get_args(annotation))), None)
