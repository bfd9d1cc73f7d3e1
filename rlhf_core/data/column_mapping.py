"""Rename columns, and convert conversations in other formats to lists of messages."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from rlhf_core.data.column_kinds import (
    CONVERSATIONS,
    ROLES,
    convert_message,
    is_python_literal,
    is_sharegpt,
    join_contents,
    parse_conversation,
)
from rlhf_core.data.source import MappedRows, Source, digest
from rlhf_core.errors import InputError, suggest

COLUMNS = (
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
"""The columns that this package reads; reward functions may read others."""


def rename_columns(source: Source, columns: Any) -> Source:
    """Rename columns of a source. columns: {name that this package reads: name in the data}.

    Raises InputError for a missing column, and where two columns would share a name.
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
        if ours not in COLUMNS and (close := difflib.get_close_matches(ours, COLUMNS, n=1, cutoff=0.8)):
            problems.append(
                f"columns.{ours} of {source.name}: nothing reads '{ours}'. Did you mean '{close[0]}'?"
            )
    if problems:
        raise InputError(*problems)
    names = {theirs: ours for ours, theirs in columns.items()}
    return replace(
        source,
        rows=MappedRows(source.rows, partial(_rename_row, names)),
        fingerprint=digest(source.fingerprint, "columns", *(f"{k}={v}" for k, v in sorted(names.items()))),
        known_kinds={names.get(name, name): kind for name, kind in source.kinds.items()},
        origin=source.original,
    )


def _rename_row(names: Mapping[str, str], row: Mapping[str, Any]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in row.items()}


def normalise_conversations(source: Source) -> Source:
    """Convert a source's conversations to lists of messages with `role` and `content`.

    Converts a column `conversations` if there is no `messages`, messages with `from` and `value` or with the roles
    human and gpt, conversations stored as JSON text, and contents that are lists of text parts; lists each conversion
    in `remarks`. Raises InputError if some but not most texts of a column are such JSON.
    """
    kinds, remarks = source.kinds, []
    names = {}
    if "conversations" in kinds and "messages" not in kinds:
        kind = kinds["conversations"]
        if kind.lists or kind.json_texts:
            names["conversations"] = "messages"
            remarks.append("column 'conversations' is read as 'messages'")
    for name in CONVERSATIONS:
        if name in kinds and kinds[name].python_texts:
            raise InputError(_literal_message(source, name))
    json_columns = [name for name in CONVERSATIONS if name in kinds and kinds[name].json_texts]
    for name in json_columns:
        kind = kinds[name]
        if kind.json_texts * 2 < kind.texts:
            raise InputError(_mixed_message(source, name))
        remarks.append(f"column '{names.get(name, name)}' holds conversations as JSON, which are read")
    sharegpt_columns = [name for name in CONVERSATIONS if name in kinds and kinds[name].sharegpt]
    if sharegpt_columns:
        roles = " and ".join(f"'{theirs}' as '{ours}'" for theirs, ours in ROLES.items())
        remarks.append(
            f"messages have ShareGPT's form: 'from' is read as 'role', 'value' as 'content', {roles}"
        )
    parts_columns = [name for name in CONVERSATIONS if name in kinds and kinds[name].parts]
    if parts_columns:
        named = ", ".join(f"'{names.get(name, name)}'" for name in parts_columns)
        remarks.append(f"contents that are lists of text parts ({named}) are read as one text")
    if not remarks:
        return source
    rows = MappedRows(
        source.rows,
        partial(
            _normalise_row,
            names,
            frozenset(json_columns),
            frozenset(sharegpt_columns),
            frozenset(parts_columns),
        ),
    )
    converted = dict(kinds)
    for name in json_columns:
        kind = kinds[name]
        converted[name] = replace(
            kind, texts=kind.texts - kind.json_texts, lists=kind.lists + kind.json_texts, text_first=False
        )
    converted = {names.get(name, name): kind for name, kind in converted.items()}
    return replace(source, rows=rows, known_kinds=converted, remarks=(*source.remarks, *remarks))


def prompts_as_turns(source: Source) -> Source:
    """Make a user's turn of every prompt that is a text, so that its completions are replies in a conversation.

    Raises InputError if there are no prompts.
    """
    kind = source.kinds.get("prompt")
    if kind is None:
        raise InputError(
            f"{source.name} has no column 'prompt' to make a user's turn of; it has {', '.join(source.columns)}"
        )
    return replace(
        source,
        rows=MappedRows(source.rows, _prompt_as_turn),
        fingerprint=digest(source.fingerprint, "prompts as turns"),
        known_kinds={**source.kinds, "prompt": replace(kind, texts=0, lists=kind.texts + kind.lists)},
        origin=source.original,
    )


def _prompt_as_turn(row: Mapping[str, Any]) -> Mapping[str, Any]:
    prompt = row.get("prompt")
    return {**row, "prompt": [{"role": "user", "content": prompt}]} if isinstance(prompt, str) else row


def _mixed_message(source: Source, name: str) -> str:
    return (
        f"{_first_place(source, name, lambda text: parse_conversation(text) is not None)}: '{name}' is the JSON of a "
        "conversation, and most others are plain texts: write conversations in all rows, or in none"
    )


def _literal_message(source: Source, name: str) -> str:
    return (
        f"{_first_place(source, name, is_python_literal)}: '{name}' is a conversation in Python's notation, with "
        "single quotes: write it with json.dumps"
    )


def _first_place(source: Source, name: str, applies: Callable[[str], bool]) -> str:
    """Name the row of the column's first text that matches `applies`."""
    for part in source.parts():
        for i, row in enumerate(part.rows):
            if isinstance(row.get(name), str) and applies(row[name]):
                return part.where(i)
    return source.name


def _normalise_row(
    names: Mapping[str, str],
    from_json: frozenset[str],
    from_sharegpt: frozenset[str],
    from_parts: frozenset[str],
    row: Mapping[str, Any],
) -> dict[str, Any]:
    normalised: dict[str, Any] = {}
    for name, value in row.items():
        if name in from_json and isinstance(value, str):
            parsed = parse_conversation(value)
            value = value if parsed is None else parsed
        if name in from_sharegpt and not isinstance(value, str) and value is not None and is_sharegpt(value):
            value = [convert_message(message) for message in value]
        if name in from_parts:
            value = join_contents(value)
        normalised[names.get(name, name)] = value
    return normalised
