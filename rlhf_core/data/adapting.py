"""Columns under other names and conversations in other forms, read as if they had those of this package."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from rlhf_core.data.kinds import (
    CONVERSATIONS,
    ROLES,
    conversation_in,
    is_foreign,
    is_literal,
    renamed_message,
)
from rlhf_core.data.source import Source, digest
from rlhf_core.data.views import Changed
from rlhf_core.errors import InputError, suggest

READ = (
    *("prompt", "chosen", "rejected", "completion", "messages", "text", "margin", "tools", "subset"),
    *("chat_template_kwargs", "input_ids_chosen", "input_ids_rejected", "attention_mask_chosen"),
    *("attention_mask_rejected", "chosen_ids", "rejected_ids", "chosen_input_ids", "rejected_input_ids"),
    *("chosen_mask", "rejected_mask", "chosen_attention_mask", "rejected_attention_mask", "prompt_ids"),
    *(
        "prompt_input_ids",
        "input_ids_prompt",
        "attention_mask_prompt",
        "prompt_attention_mask",
        "prompt_mask",
    ),
)
"""Columns that are read under a name of their own; a reward function may name others."""


def with_columns(source: Source, columns: Any) -> Source:
    """The source with columns renamed. columns: {name that is read: name in the data}.

    Raises InputError for a column that is not there, and for two of one name.
    """
    if not isinstance(columns, Mapping) or not all(isinstance(name, str) for name in columns.values()):
        raise InputError(
            f'columns of {source.name} is {columns!r}: give a table such as {{ prompt = "question" }}'
        )
    have = source.columns
    problems = [
        f"{source.name} has no column '{theirs}', which columns.{ours} names; it has {', '.join(have)}."
        f"{suggest(theirs, have)}"
        for ours, theirs in columns.items()
        if theirs not in have
    ]
    taken = [ours for ours in columns if ours in have and ours not in columns.values()]
    problems += [
        f"columns.{ours} of {source.name} names '{columns[ours]}', but there is a column '{ours}' too: give that one "
        f'another name, {{ {ours}_before = "{ours}" }}'
        for ours in taken
    ]
    if len(set(columns.values())) < len(columns):
        problems.append(f"columns of {source.name} names one column twice")
    for ours in columns:
        if ours not in READ and (close := difflib.get_close_matches(ours, READ, n=1, cutoff=0.8)):
            problems.append(
                f"columns.{ours} of {source.name}: nothing reads '{ours}'. Did you mean '{close[0]}'?"
            )
    if problems:
        raise InputError(*problems)
    names = {theirs: ours for ours, theirs in columns.items()}
    return replace(
        source,
        rows=Changed(source.rows, partial(_renamed, names)),
        fingerprint=digest(source.fingerprint, "columns", *(f"{k}={v}" for k, v in sorted(names.items()))),
        known={names.get(name, name): kind for name, kind in source.kinds.items()},
        origin=source.source,
    )


def _renamed(names: Mapping[str, str], row: Mapping[str, Any]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in row.items()}


def adapted(source: Source) -> Source:
    """The source with its conversations as lists of messages with roles and contents.

    Read so, and said in `remarks`: a column `conversations` where there is no `messages`; messages with `from` and
    `value`, or with the roles human and gpt; conversations that stand in their cells as JSON text. Raises InputError
    where some texts of a column are such JSON, and most are not.
    """
    kinds, remarks = source.kinds, []
    names = {}
    if "conversations" in kinds and "messages" not in kinds:
        kind = kinds["conversations"]
        if kind.lists or kind.written:
            names["conversations"] = "messages"
            remarks.append("column 'conversations' is read as 'messages'")
    for name in CONVERSATIONS:
        if name in kinds and kinds[name].literal:
            raise InputError(_literal(source, name))
    written = [name for name in CONVERSATIONS if name in kinds and kinds[name].written]
    for name in written:
        kind = kinds[name]
        if kind.written * 2 < kind.texts:
            raise InputError(_mixed(source, name))
        remarks.append(f"column '{names.get(name, name)}' holds conversations as JSON, which are read")
    foreign = [name for name in CONVERSATIONS if name in kinds and kinds[name].foreign]
    if foreign:
        roles = " and ".join(f"'{theirs}' as '{ours}'" for theirs, ours in ROLES.items())
        remarks.append(
            f"messages have ShareGPT's form: 'from' is read as 'role', 'value' as 'content', {roles}"
        )
    if not remarks:
        return source
    rows = Changed(source.rows, partial(_adapted, names, frozenset(written), frozenset(foreign)))
    found = dict(kinds)
    for name in written:  # their texts are lists from now on
        found[name] = replace(
            found[name],
            texts=found[name].texts - found[name].written,
            lists=found[name].lists + found[name].written,
            text_first=False,
        )
    found = {names.get(name, name): kind for name, kind in found.items()}
    return replace(source, rows=rows, known=found, remarks=(*source.remarks, *remarks))


def _mixed(source: Source, name: str) -> str:
    return (
        f"{_first(source, name, lambda text: conversation_in(text) is not None)}: '{name}' is the JSON of a "
        "conversation, and most others are plain texts: write conversations in all rows, or in none"
    )


def _literal(source: Source, name: str) -> str:
    return (
        f"{_first(source, name, is_literal)}: '{name}' is a conversation in Python's notation, with single quotes: "
        "write it with json.dumps"
    )


def _first(source: Source, name: str, applies: Callable[[str], bool]) -> str:
    """Where the first text of a column stands to which this applies."""
    for part in source.parts():
        for i, row in enumerate(part.rows):
            if isinstance(row.get(name), str) and applies(row[name]):
                return part.where(i)
    return source.name


def _adapted(
    names: Mapping[str, str], written: frozenset[str], foreign: frozenset[str], row: Mapping[str, Any]
) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in row.items():
        if name in written and isinstance(value, str):
            parsed = conversation_in(value)
            value = value if parsed is None else parsed
        if name in foreign and not isinstance(value, str) and value is not None and is_foreign(value):
            value = [renamed_message(message) for message in value]
        out[names.get(name, name)] = value
    return out
