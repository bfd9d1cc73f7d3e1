"""Rubrics: the question that a judge is asked, and the scale on which its answer is read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core import InputError
from rlhf_core.errors import reading, suggest
from rlhf_core.tokenizer.thoughts import spoken_spans, without_thoughts
from rlhf_remote.scores import as_number, stated_score

PLACE = re.compile(r"\{\{([A-Za-z_]\w*)\}\}|\{([A-Za-z_]\w*)\}")
"""`{name}`, which is replaced, or `{{name}}`, which stands for `{name}` itself."""
OWN = ("prompt", "completion")
NUMBER_BEFORE, NUMBER_AFTER = re.compile(r"\d[.,]?$|(?<!\w)[-−–.]$"), re.compile(r"[.,]?\d")
"""What stands next to digits that are a part of a number."""
FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Rubric:
    """The text of a rubric file; `{prompt}`, `{completion}` and `{COLUMN}` stand for a row's."""

    path: str
    text: str

    @classmethod
    def read(cls, path: str) -> Rubric:
        """Read a file. Raises InputError if it cannot be read, or says nothing about the completion."""
        file = Path(path).expanduser()
        if not file.is_file():
            raise InputError(f"rubric_file: no such file: {path}")
        with reading(file):
            rubric = cls(path, file.read_text(encoding="utf-8-sig"))
        if "completion" not in rubric.names():
            raise InputError(
                f"{path}: {{completion}} is nowhere in it, so every completion would get the same answer"
            )
        return rubric

    def names(self) -> dict[str, int]:
        """Return {name: the line where it is first used}."""
        found: dict[str, int] = {}
        for match in PLACE.finditer(self.text):
            if match[2]:
                found.setdefault(match[2], self.text.count("\n", 0, match.start()) + 1)
        return found

    def columns(self) -> list[str]:
        """List the columns that it uses."""
        return [name for name in self.names() if name not in OWN]

    def check(self, columns: Collection[str]) -> None:
        """Raise InputError, with the line of each, for names that are no columns."""
        known = [*OWN, *columns]
        problems = [
            f"{self.path} line {line}: {{{name}}}: there is no such column.{suggest(name, known)} Columns: "
            f"{', '.join(known)}; write {{{{{name}}}}} for the text itself"
            for name, line in self.names().items()
            if name not in known
        ]
        if problems:
            raise InputError(*problems)

    def fill(self, values: Mapping[str, Any]) -> str:
        """Put values in their places, all in one pass: what a value contains is never replaced in its turn."""
        return PLACE.sub(
            lambda match: as_text(values[match[2]]) if match[2] else f"{{{match[1]}}}", self.text
        )


def as_text(value: Any) -> str:
    """Write a prompt, a completion or a column's value; of several messages, each under its role."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and value and all(isinstance(m, Mapping) and "role" in m for m in value):
        if len(value) == 1:
            return _content(value[0])
        return "\n\n".join(f"{str(message['role']).capitalize()}:\n{_content(message)}" for message in value)
    return json.dumps(value, ensure_ascii=False, default=str)


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    calls = message.get("tool_calls")
    text = "" if content is None else as_text(content)
    return f"{text}\n{json.dumps(calls, ensure_ascii=False, default=str)}".strip() if calls else text


@dataclass(frozen=True)
class Scale:
    """Reads the number in an answer: as `stated_score` does, by a pattern's last match, or in JSON that fits a schema.

    What is in a thought does not count.

    low, high: the smallest and the largest number allowed. words: {what a match may be: its number}, without regard to
    case; empty: matches are numbers themselves.
    """

    low: float = -math.inf
    high: float = math.inf
    words: Mapping[str, float] | None = None
    pattern: re.Pattern[str] | None = None
    schema: Mapping[str, Any] | None = None
    field: str = "score"

    def read(self, answer: str) -> float | None:
        """Return the number in an answer; None if there is none, or one outside the scale."""
        if self.schema is not None:
            found = self._from_json(without_thoughts(answer))
        elif self.pattern is not None:
            found = self._matched(answer, self.pattern)
        else:
            found = stated_score(answer, self.high)
        if found is None:
            return None
        if self.words is None:
            number = as_number(found)
        else:
            by_word = {word.casefold(): number for word, number in self.words.items()}
            number = by_word.get(found.strip().casefold())
        return number if number is not None and self.low <= number <= self.high else None

    def _matched(self, answer: str, pattern: re.Pattern[str]) -> str | None:
        """Return the last match of a pattern, or its first group; None if it is part of a longer number."""
        group = 1 if pattern.groups else 0
        spoken = spoken_spans(answer)
        last = None
        for match in pattern.finditer(answer):
            if any(start <= match.end(group) <= end for start, end in spoken) or match[group] is None:
                last = match
        if last is None or last[group] is None:
            return None
        start, end = last.span(group)
        is_part = self.words is None and (
            NUMBER_BEFORE.search(answer[max(start - 2, 0) : start]) or NUMBER_AFTER.match(answer, end)
        )
        return None if is_part else answer[start:end]

    def _from_json(self, answer: str) -> str | None:
        import jsonschema

        fenced = FENCE.findall(answer)
        try:
            value = json.loads(fenced[-1] if fenced else answer)
            jsonschema.validate(value, self.schema)
        except (ValueError, RecursionError, jsonschema.ValidationError):
            return None
        found = value.get(self.field) if isinstance(value, Mapping) else None
        return str(found) if isinstance(found, int | float | str) and not isinstance(found, bool) else None


def read_schema(path: str, field: str) -> dict[str, Any]:
    """Read a JSON schema. Raises InputError unless it is one of an object with the property `field`."""
    import jsonschema

    file = Path(path).expanduser()
    if not file.is_file():
        raise InputError(f"schema_file: no such file: {path}")
    with reading(file):
        try:
            schema = json.loads(file.read_text(encoding="utf-8-sig"))
            jsonschema.validators.validator_for(schema).check_schema(schema)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}: is not JSON: {error}") from None
        except jsonschema.SchemaError as error:
            raise InputError(f"{path}: is not a JSON schema: {error.message}") from None
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping) or field not in properties:
        raise InputError(
            f"{path}: has no property '{field}' to read a number from.{suggest(field, list(properties or ()))} "
            f'Write {{"type": "object", "properties": {{"{field}": {{"type": "number"}}}}, "required": ["{field}"]}}, '
            "or name the property with `score_field`"
        )
    return dict(schema)
