"""Rename columns, and convert conversations in other formats to lists of messages."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
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
from rlhf_core.data.source import Source, digest, mapped
from rlhf_core.errors import InputError, suggest
from rlhf_core.tokenizer.options import is_parts

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


SYNONYMS: dict[str, tuple[str, ...]] = {
    "prompt": ("instruction", "question", "query", "problem", "input", "user"),
    "completion": ("output", "response", "answer", "target", "assistant", "completions"),
    "chosen": ("chosen_response", "response_chosen", "preferred", "better", "accepted", "positive"),
    "rejected": ("rejected_response", "response_rejected", "dispreferred", "worse", "declined", "negative"),
    "messages": (),
    "text": ("content", "document"),
}
"""{column: names that published datasets have for it, in order of precedence}."""


def mapping_hint(source: Source, *formats: tuple[str, ...]) -> str:
    """Return a sentence with the line that makes a source's columns one of these formats; "" if none fits.

    formats: the columns that each needs. Conversations are found by their form; Alpaca's `input` joins its instruction.
    """
    if field := _wrapped_rows(source):
        rows = source.rows[0][field]
        inner = _mapping(Source(source.name, rows, range(len(rows)), ""), formats)
        table = f'path = {json.dumps(source.name)}, field = "{field}"'
        table += f", columns = {_as_toml(inner)}" if inner else ""
        return f" The rows are in the list '{field}': in a stage write train_data = {{ {table} }}."
    mapping = _mapping(source, formats)
    return f" In a stage write columns = {_as_toml(mapping)}." if mapping else ""


def _wrapped_rows(source: Source) -> str | None:
    """Name the column of a single row that holds all rows as a list; None if there is none."""
    if len(source.rows) != 1:
        return None
    lists = {name: value for name, value in source.rows[0].items() if name not in (*COLUMNS, "conversations")}
    return next(
        (name for name, value in lists.items() if _holds(value, lambda row: not _is_message(row))), None
    )


def _holds(value: Any, of: Callable[[Mapping[str, Any]], bool]) -> bool:
    """Whether a value is a list of objects that all are `of` a kind."""
    return (
        is_parts(value) and len(value) > 0 and all(isinstance(item, Mapping) and of(item) for item in value)
    )


def _mapping(source: Source, formats: Sequence[tuple[str, ...]]) -> dict[str, str | list[str]]:
    """Return the `columns` that make a source one of the formats; {} if none fits."""
    have = source.columns
    for wanted in formats:
        mapping: dict[str, str | list[str]] = {}
        for ours in wanted:
            free = [name for name in have if name not in mapping.values() and name not in COLUMNS]
            names = [name for name in SYNONYMS[ours] if name in free]
            if ours == "messages":
                names = [name for name in free if _holds(source.rows[0].get(name), _is_message)]
            if ours in have:
                continue
            if not names:
                break
            joined = names[0] == "instruction" and "input" in free
            mapping[ours] = ["instruction", "input"] if joined else names[0]
        else:
            return mapping
    return {}


def _is_message(item: Mapping[str, Any]) -> bool:
    return {"role", "content"} <= set(item) or {"from", "value"} <= set(item)


def _as_toml(mapping: Mapping[str, str | list[str]]) -> str:
    return f"{{ {', '.join(f'{name} = {json.dumps(theirs)}' for name, theirs in mapping.items())} }}"


def rename_columns(source: Source, columns: Any) -> Source:
    """Rename columns of a source. columns: {name that this package reads: name in the data}.

    Texts of several columns, given as a list, become one, with an empty line between those that are not empty.
    Raises InputError for a missing column, and where two columns would share a name.
    """
    listed = {
        ours: [theirs] if isinstance(theirs, str) else theirs
        for ours, theirs in (columns.items() if isinstance(columns, Mapping) else ())
    }
    if not listed or not all(
        isinstance(names, list) and names and all(isinstance(name, str) for name in names)
        for names in listed.values()
    ):
        raise InputError(
            f'columns of {source.name} is {columns!r}: give a table such as {{ prompt = "question" }}'
        )
    have = source.columns
    used = [name for names in listed.values() for name in names]
    problems = [
        f"{source.name} has no column '{theirs}', which columns.{ours} names; it has {', '.join(have)}."
        f"{suggest(theirs, have)}"
        for ours, names in listed.items()
        for theirs in names
        if theirs not in have
    ]
    taken = [ours for ours in listed if ours in have and ours not in used]
    problems += [
        f"columns.{ours} of {source.name} names '{', '.join(listed[ours])}', but there is a column '{ours}' too: give "
        f'that one another name, {{ {ours}_before = "{ours}" }}'
        for ours in taken
    ]
    if len(set(used)) < len(used):
        problems.append(f"columns of {source.name} names one column twice")
    for ours in listed:
        if ours not in COLUMNS and (close := difflib.get_close_matches(ours, COLUMNS, n=1, cutoff=0.8)):
            problems.append(
                f"columns.{ours} of {source.name}: nothing reads '{ours}'. Did you mean '{close[0]}'?"
            )
    if problems:
        raise InputError(*problems)
    names = {theirs[0]: ours for ours, theirs in listed.items()}
    gone = {name for theirs in listed.values() for name in theirs[1:]}
    return replace(
        source,
        rows=mapped(source.rows, partial(_rename_row, listed)),
        fingerprint=digest(source.fingerprint, "columns", *(f"{k}={v}" for k, v in sorted(columns.items()))),
        known_kinds={names.get(name, name): kind for name, kind in source.kinds.items() if name not in gone},
        origin=source.original,
    )


def _rename_row(listed: Mapping[str, Sequence[str]], row: Mapping[str, Any]) -> dict[str, Any]:
    new = {theirs: (ours, names) for ours, names in listed.items() for theirs in names}
    renamed: dict[str, Any] = {}
    for name, value in row.items():
        ours, names = new.get(name, (name, (name,)))
        if ours not in renamed:
            renamed[ours] = value if len(names) == 1 else _joined([row.get(each) for each in names])
    return renamed


def _joined(values: list[Any]) -> Any:
    """Join texts with an empty line; return other values as they are, which no reader takes."""
    if not all(isinstance(value, str | None) for value in values):
        return values
    return "\n\n".join(value for value in values if value and value.strip())


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
    rows = mapped(
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
        rows=mapped(source.rows, _prompt_as_turn),
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
