"""Rename and convert the columns of a table, and check cells that hold texts or conversations."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from rlhf_core.config.toml import to_value
from rlhf_core.data.table import (
    CONVERSATIONS,
    ROLES,
    ColumnKind,
    Table,
    View,
    has_sharegpt_keys,
    is_python_literal,
    is_sharegpt,
    parse_conversation,
)
from rlhf_core.errors import InputError, counted, library_words, suggest
from rlhf_core.tokenizer.calls import arguments_problem, with_parsed_parameters
from rlhf_core.tokenizer.encoding import Encoder, Turns
from rlhf_core.tokenizer.options import is_parts, kwargs_problem, parts_problem, with_joined_parts

ID_NAMES = ("input_ids_{}", "{}_ids", "{}_input_ids")
MASK_NAMES = ("attention_mask_{}", "{}_attention_mask", "{}_mask")
"""What columns of token ids, and of their masks, are called; {} is chosen, rejected or prompt."""
COLUMNS = (
    *("prompt", "chosen", "rejected", "completion", "messages", "text", "margin", "tools", "subset"),
    "chat_template_kwargs",
    *(name.format(of) for name in ID_NAMES + MASK_NAMES for of in ("chosen", "rejected", "prompt")),
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
WORDS: dict[str, frozenset[str]] = {
    "chosen": frozenset(
        {"chosen", "preferred", "accepted", "positive", "good", "better", "best", "winner", "win"}
    ),
    "rejected": frozenset(
        {"rejected", "dispreferred", "declined", "negative", "bad", "worse", "worst", "loser"}
    ),
}
"""{column: words that mark other names for it, as "good" does in "good_answer"}."""


def mapping_hint(table: Table, *formats: tuple[str, ...]) -> str:
    """Return a sentence with the line that makes a table's columns one of these formats; "" if none fits.

    formats: the columns that each needs. Conversations are found by their form; Alpaca's `input` joins its instruction.
    """
    field = _wrapped_rows(table)
    if field is not None:
        rows = table.rows[0][field]
        inner = propose_columns(Table(table.name, rows, range(len(rows)), ""), *formats)
        where = f'path = {json.dumps(table.name)}, field = "{field}"'
        where += f", columns = {to_value(inner)}" if inner else ""
        return f" The rows are in the list '{field}': in a stage write train_data = {{ {where} }}."
    mapping = propose_columns(table, *formats)
    if not mapping:
        return ""
    hint = f" In a stage write columns = {to_value(mapping)}."
    answers = _two_answers(table, mapping)
    if answers:
        prompt = mapping if "prompt" in mapping else {}
        pairs = [
            to_value({**prompt, "chosen": one, "rejected": other}) for one, other in (answers, answers[::-1])
        ]
        hint += f" For preferences say which answer is better: columns = {pairs[0]}, or {pairs[1]}."
    return hint


def _two_answers(table: Table, mapping: Mapping[str, str | list[str]]) -> list[str]:
    """Return the two columns whose names say that they are answers to one prompt, answer_a and answer_b; else []."""
    first = table.rows[0]
    if list(mapping) == ["messages"]:
        names = [name for name in table.columns if _holds(first.get(name), _is_message)]
    elif list(mapping) == ["prompt"]:
        free = [name for name in table.columns if name not in mapping.values()]
        names = [name for name in free if isinstance(first.get(name), str) and len(_start(name)) > 2]
        names = [name for name in names if [_start(other) for other in names].count(_start(name)) == 2]
    else:
        return []
    return names if len(names) == 2 else []


def _start(name: str) -> str:
    """Return a name without a last letter or number, such as "answer_" of answer_a and answer_1."""
    return re.sub(r"(?<![a-zA-Z])[a-zA-Z]$|\d+$|(?<=[a-z])[A-Z]$", "", name)


def _wrapped_rows(table: Table) -> str | None:
    """Name the column of a single row that holds all rows as a list; None if there is none."""
    if len(table.rows) != 1:
        return None
    lists = {name: value for name, value in table.rows[0].items() if name not in (*COLUMNS, "conversations")}
    return next(
        (name for name, value in lists.items() if _holds(value, lambda row: not _is_message(row))), None
    )


def _holds(value: Any, of: Callable[[Mapping[str, Any]], bool]) -> bool:
    """Whether a value is a list of objects that all are `of` a kind."""
    return (
        is_parts(value) and len(value) > 0 and all(isinstance(item, Mapping) and of(item) for item in value)
    )


def propose_columns(table: Table, *formats: tuple[str, ...]) -> dict[str, str | list[str]]:
    """Return the `columns` that make a table the first of these formats that fits; {} if none does."""
    for wanted in formats:
        mapping: dict[str, str | list[str]] = {}
        missing = [ours for ours in wanted if ours not in table.columns]
        for ours in missing:
            free = [name for name in table.columns if name not in mapping.values() and name not in COLUMNS]
            names = _names_like(ours, free, table)
            if not names:
                break
            joined = names[0] == "instruction" and "input" in free
            mapping[ours] = ["instruction", "input"] if joined else names[0]
        else:
            return mapping
    return {}


def _names_like(ours: str, free: Sequence[str], table: Table) -> list[str]:
    """List the free columns that may be one of ours, the likeliest first."""
    if ours == "messages":
        return [name for name in free if _holds(table.rows[0].get(name), _is_message)]
    marks = WORDS.get(ours, frozenset())
    return [name for name in SYNONYMS[ours] if name in free] + [name for name in free if marks & _words(name)]


def _is_message(item: Mapping[str, Any]) -> bool:
    return {"role", "content"} <= set(item) or {"from", "value"} <= set(item)


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z]+", name.lower()))


def rename_columns(table: Table, columns: Any) -> Table:
    """Rename columns of a table. columns: {name that this package reads: name in the data}.

    Texts of several columns, given as a list, become one, with an empty line between those that are not empty.
    Raises InputError for a missing column, and where two columns would share a name.
    """
    listed = _listed(table, columns)
    problems = _naming_problems(table, listed)
    if problems:
        raise InputError(*problems)
    names = {theirs[0]: ours for ours, theirs in listed.items()}
    gone = {name for theirs in listed.values() for name in theirs[1:]}
    how = "\0".join(["columns", *(f"{k}={v}" for k, v in sorted(columns.items()))])
    kinds = {names.get(name, name): kind for name, kind in table.kinds.items() if name not in gone}
    renamed = {ours: " + ".join(theirs) for ours, theirs in listed.items() if theirs != [ours]}
    return replace(table.changed(partial(_rename_row, listed), how, kinds), renamed=renamed)


def _listed(table: Table, columns: Any) -> dict[str, list[str]]:
    """Return {our name: the names in the data} of `columns`. Raises InputError where it is no such table."""
    table_of_names = columns if isinstance(columns, Mapping) else {}
    listed = {
        ours: [theirs] if isinstance(theirs, str) else theirs for ours, theirs in table_of_names.items()
    }
    if not listed or not all(map(_is_names, listed.values())):
        raise InputError(
            f'columns of {table.name} is {columns!r}: give a table such as {{ prompt = "question" }}'
        )
    return listed


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(name, str) for name in value)


def _naming_problems(table: Table, listed: Mapping[str, Sequence[str]]) -> list[str]:
    """Describe columns that are not there, that two columns would share, and that nothing reads."""
    have = table.columns
    pairs = [(ours, theirs) for ours, names in listed.items() for theirs in names]
    used = [theirs for _, theirs in pairs]
    problems = [
        f"{table.name} has no column '{theirs}', which columns.{ours} names; it has {', '.join(have)}."
        f"{suggest(theirs, have)}"
        for ours, theirs in pairs
        if theirs not in have
    ]
    taken = [ours for ours in listed if ours in have and ours not in used]
    problems += [
        f"columns.{ours} of {table.name} names '{', '.join(listed[ours])}', but there is a column '{ours}' too: give "
        f'that one another name, {{ {ours}_before = "{ours}" }}'
        for ours in taken
    ]
    if len(set(used)) < len(used):
        problems.append(f"columns of {table.name} names one column twice")
    for ours in [name for name in listed if name not in COLUMNS]:
        close = difflib.get_close_matches(ours, COLUMNS, n=1, cutoff=0.8)
        if close:
            problems.append(
                f"columns.{ours} of {table.name}: nothing reads '{ours}'. Did you mean '{close[0]}'?"
            )
    return problems


def _rename_row(listed: Mapping[str, Sequence[str]], row: Mapping[str, Any]) -> dict[str, Any]:
    new = {theirs: (ours, names) for ours, names in listed.items() for theirs in names}
    renamed: dict[str, Any] = {}
    for name, value in row.items():
        ours, names = new.get(name, (name, (name,)))
        if ours not in renamed:
            renamed[ours] = value if len(names) == 1 else _joined([row.get(each) for each in names])
    return renamed


def _joined(values: list[Any]) -> Any:
    """Join texts with an empty line; return other values unchanged, which no reader accepts."""
    if not all(isinstance(value, str | None) for value in values):
        return values
    return "\n\n".join(value for value in values if value and value.strip())


IMAGES = ("images", "image", "videos", "video", "audios", "audio", "pixel_values")
"""Columns that models with a vision or audio tower are trained on elsewhere."""


def require_text(table: Table) -> None:
    """Raise InputError for the first row that has an image, a video or a sound in a column of its own."""
    for name in IMAGES:
        if name not in table.kinds:
            continue
        for i, row in enumerate(table.rows):
            value = row.get(name)
            if value is not None and (not hasattr(value, "__len__") or len(value)):
                raise InputError(
                    f"{table.where(i)}: column '{name}' is not empty, and models are trained on text alone: remove "
                    "the row, or the column"
                )


def normalise_conversations(table: Table) -> Table:
    """Convert a table's conversations to lists of messages with `role` and `content`.

    Converts a column `conversations` if there is no `messages`, messages with `from` and `value` or with the roles
    human and gpt, conversations stored as JSON text, and contents given as lists of text parts; lists each conversion
    in `remarks`. Raises InputError if some but not most texts of a column are such JSON.
    """
    kinds = table.kinds
    chats = {name: kinds[name] for name in CONVERSATIONS if name in kinds}
    new_names: dict[str, str] = {}
    remarks: list[str] = []
    if "conversations" in chats and "messages" not in chats:
        other = chats["conversations"]
        if other.lists or other.json_texts:
            new_names["conversations"] = "messages"
            remarks.append("reading column 'conversations' as 'messages'")
    for name, kind in chats.items():
        _require_conversations(table, name, kind)
        if kind.json_texts:
            shown = new_names.get(name, name)
            remarks.append(f"column '{shown}' holds conversations as JSON, which are read")
    if any(kind.sharegpt for kind in chats.values()):
        roles = " and ".join(f"'{theirs}' as '{ours}'" for theirs, ours in ROLES.items())
        remarks.append(
            f"messages have ShareGPT's form: 'from' is read as 'role', 'value' as 'content', {roles}"
        )
    parts = [f"'{new_names.get(name, name)}'" for name, kind in chats.items() if kind.parts]
    if parts:
        remarks.append(f"contents given as lists of text parts ({', '.join(parts)}) are joined into one text")
    if not remarks:
        return table
    new_kinds: dict[str, ColumnKind] = {}
    for name, kind in kinds.items():
        if name in chats:
            kind = _with_parsed_texts(kind)
        new_kinds[new_names.get(name, name)] = kind

    def normalise(row: Mapping[str, Any]) -> dict[str, Any]:
        normalised = {}
        for name, value in row.items():
            if name in chats:
                value = _normalised(value)
            normalised[new_names.get(name, name)] = value
        return normalised

    rows = View.of(table.rows).changed(normalise)
    return replace(table, rows=rows, known_kinds=new_kinds, remarks=(*table.remarks, *remarks))


def _with_parsed_texts(kind: ColumnKind) -> ColumnKind:
    """Count the texts that are the JSON of a conversation as the lists that they become."""
    if not kind.json_texts:
        return kind
    lists = kind.lists + kind.json_texts
    return replace(kind, texts=kind.texts - kind.json_texts, lists=lists, text_first=False)


def _require_conversations(table: Table, name: str, kind: ColumnKind) -> None:
    """Raise InputError for conversations in Python's notation, and where a minority of texts are conversations."""
    if kind.python_texts:
        raise InputError(
            f"{_first_place(table, name, is_python_literal)}: '{name}' is a conversation in Python's notation, "
            "with single quotes: write it with json.dumps"
        )
    if 0 < kind.json_texts * 2 < kind.texts:
        place = _first_place(table, name, lambda text: parse_conversation(text) is not None)
        raise InputError(
            f"{place}: '{name}' is the JSON of a conversation, and most others are plain text: use "
            "conversations in all rows, or in none"
        )


def _normalised(value: Any) -> Any:
    """Convert a conversation to messages with `role` and `content`; return any other value unchanged."""
    if isinstance(value, str):
        parsed = parse_conversation(value)
        value = value if parsed is None else parsed
    if not is_parts(value):
        return value
    return join_contents([convert_message(item) for item in value] if is_sharegpt(value) else value)


def _first_place(table: Table, name: str, applies: Callable[[str], bool]) -> str:
    """Name the row of the column's first text that matches `applies`."""
    rows = (i for i, row in enumerate(table.rows) if isinstance(row.get(name), str) and applies(row[name]))
    return table.where(next(rows))


def join_contents(messages: Any) -> Any:
    """Apply `with_joined_parts` to a conversation, or to a list of them; return any other value unchanged."""
    if not is_parts(messages):
        return messages
    return [join_contents(item) if is_parts(item) else with_joined_parts(item) for item in messages]


def convert_message(message: Any) -> Any:
    """Convert a message from ShareGPT's format; return any other value unchanged."""
    if not isinstance(message, Mapping):
        return message
    if has_sharegpt_keys(message):
        names = {"from": "role", "value": "content"}
        message = {names.get(key, key): value for key, value in message.items()}
    role = message.get("role")
    return {**message, "role": ROLES[role]} if isinstance(role, str) and role in ROLES else message


FOR_TEMPLATES = ("tools", "chat_template_kwargs")
"""Columns of a conversation that go to its chat template."""


def message_problem(value: Any) -> str | None:
    """Describe what is wrong with a conversation, or return None."""
    if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str | bytes):
        return f"is {type_name(value)}, not a list of messages"
    if not len(value):
        return "is an empty conversation"
    for i, message in enumerate(value, 1):
        if not isinstance(message, Mapping):
            return f"message {i} is {type_name(message)}, not an object with role and content"
        if not isinstance(message.get("role"), str):
            return f"message {i} has no role (its keys: {', '.join(map(str, message)) or 'none'})"
        problem = _content_problem(message)
        if problem:
            return f"message {i}{problem}"
        calls = message.get("tool_calls")
        if calls is not None and not _is_object_list(calls):
            return f"message {i}'s tool_calls must be a list of objects"
        problem = arguments_problem(message)
        if problem:
            return f"message {i}: {problem}"
    return None


def _content_problem(message: Mapping[str, Any]) -> str | None:
    """Describe what is wrong with a message's content, to follow its number, or return None."""
    content = message.get("content")
    if content is None:
        keys = ", ".join(map(str, message))
        return None if message.get("tool_calls") else f" has no content (its keys: {keys})"
    if is_parts(content):
        problem = parts_problem(content)
        return f": {problem}" if problem else None
    return None if isinstance(content, str) else f"'s content is {type_name(content)}, not text"


def tools_of(row: Mapping[str, Any]) -> list[Any] | None:
    """Read the JSON schemas of the tools that the row's conversation may call, a list or its JSON text.

    Raises InputError for anything else.
    """
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise InputError(
                f"'tools' is not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
            ) from error
        except (RecursionError, ValueError) as error:  # nested too deeply, or a number with too many digits
            raise InputError(f"'tools' cannot be read: {library_words(error)}") from error
    if tools is None or isinstance(tools, str):
        return None
    if not _is_object_list(tools):
        raise InputError("'tools' must be a list of objects")
    try:
        return with_parsed_parameters(tools) or None
    except InputError as error:
        raise InputError(f"'tools': {error}") from None


def kwargs_of(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read the row's `chat_template_kwargs`, variables for the template: an object or its JSON text.

    Raises InputError for anything else.
    """
    kwargs = row.get("chat_template_kwargs")
    if isinstance(kwargs, str) and kwargs.strip():
        try:
            kwargs = json.loads(kwargs)
        except (ValueError, RecursionError) as error:
            raise InputError(f"'chat_template_kwargs' is not JSON: {kwargs!r}") from error
    if kwargs is None or isinstance(kwargs, str):
        return None
    problem = kwargs_problem(kwargs)
    if problem:
        raise InputError(f"'chat_template_kwargs' {problem}")
    return dict(kwargs) or None


def _is_object_list(value: Any) -> bool:
    return isinstance(value, list | tuple | np.ndarray) and all(isinstance(item, Mapping) for item in value)


def type_name(value: Any) -> str:
    """Name a value's type in the terms of a data file."""
    names = {type(None): "null", str: "text", bool: "a boolean", int: "a number", float: "a number"}
    if isinstance(value, Mapping):
        return "an object"
    return names.get(type(value), "a list" if isinstance(value, list | tuple) else type(value).__name__)


def cell_problem(row: Mapping[str, Any], column: str, chat: bool) -> str | None:
    """Describe what is wrong with a cell that must hold a text, or with `chat` a conversation; None if nothing is."""
    value = row.get(column)
    if column not in row:
        return f"has no '{column}' (it has {', '.join(map(str, row)) or 'nothing'})"
    if value is None:
        return f"'{column}' is null"
    if chat:
        problem = message_problem(value)
        return problem and f"'{column}' {problem}"
    return None if isinstance(value, str) else f"'{column}' is {type_name(value)}, not text"


def is_chat(table: Table, column: str) -> bool:
    """Whether a column holds conversations, by `ColumnKind.chat`."""
    return table.kind(column).chat


def describe_columns(tables: Sequence[Table], names: Sequence[Sequence[str]]) -> str:
    """List columns with the rows that have them: "prompt, chosen ← good (1,200), margin (310)".

    names: the columns of each table.
    """
    counts: dict[tuple[str, bool], int] = {}
    for table, read in zip(tables, names, strict=True):
        for name in read:
            kind = table.kind(name)
            theirs = table.renamed.get(name)
            if kind.total:
                shown = name if theirs is None else f"{name} ← {theirs}"
                key = shown, name in CONVERSATIONS and kind.chat
                counts[key] = counts.get(key, 0) + kind.total
    groups: dict[str, list[str]] = {}
    for (column, chat), count in counts.items():
        groups.setdefault(counted(count, "conversations") if chat else f"{count:,}", []).append(column)
    return ", ".join(f"{', '.join(columns)} ({count})" for count, columns in groups.items())


def require_conversations(tables: Sequence[Table], option: str = "system_prompt") -> None:
    """Raise InputError for tables without conversations, to which a system prompt cannot be added."""
    problems = [
        f"{option}: {table.name} has plain texts, not conversations, and a system message needs a conversation. "
        f'Write the rows as messages, {{"role": "user", "content": …}}, or leave out {option}'
        for table in tables
        if not any(is_chat(table, name) for name in CONVERSATIONS if name in table.columns)
    ]
    if problems:
        raise InputError(*problems)


def skips_template(table: Table, encoder: Encoder | None, *columns: str) -> bool:
    """Whether these columns hold plain texts although the tokenizer has a chat template."""
    if encoder is None or encoder.template is None or not set(columns) <= set(table.columns):
        return False
    return not any(is_chat(table, name) for name in columns)


def is_blank(turns: Turns) -> bool:
    """Whether a completion, or the last turn of one, is only white space."""
    if isinstance(turns, str):
        return not turns.strip()
    last = turns[-1] if len(turns) else {}
    return not (last.get("content") or "").strip() and not last.get("tool_calls")


def is_answered(turns: Turns) -> bool:
    """Whether a conversation has an assistant turn; texts count as answered."""
    return isinstance(turns, str) or any(turn["role"] == "assistant" for turn in turns)


def unanswered_problem(row: Mapping[str, Any], column: str, purpose: str = "judged") -> str | None:
    """Describe a conversation without an assistant turn as a problem, or return None."""
    if is_answered(row[column]):
        return None
    roles = ", ".join(dict.fromkeys(turn["role"] for turn in row[column]))
    return f"'{column}' has no assistant turn, the reply to be {purpose} (its roles: {roles})"


def missing_columns(
    table: Table, wanted: Sequence[str], accepted: str, *formats: tuple[str, ...]
) -> InputError:
    """Make the error for missing columns. accepted: the formats that would work. formats: as in `mapping_hint`."""
    columns = table.columns
    absent = [column for column in wanted if column not in columns]
    hints = mapping_hint(table, *formats)
    close = {column: difflib.get_close_matches(column, columns, n=1) for column in absent}
    if not hints and any(close.values()):
        misspelt = {column: found[0] for column, found in close.items() if found}
        hints = f" In a stage write columns = {to_value(misspelt)}, or rename the column."
    listed = ", ".join(f"'{column}'" for column in absent)
    return InputError(
        f"{table.name} has no column {listed}; it has {', '.join(columns)}.{hints} Accepted: {accepted}"
    )


def require_template(table: Table, encoder: Encoder) -> None:
    """Raise InputError if the tokenizer has no valid chat template for the table's conversations."""
    if encoder.template is None:
        raise InputError(
            f"{table.name} has conversations, and the tokenizer has no chat template: set "
            'chat_template = "plain" or a template file, or put chat_template.jinja next to the tokenizer\'s files'
        )
    problem = encoder.chat.problem()
    if problem:
        raise InputError(problem)
