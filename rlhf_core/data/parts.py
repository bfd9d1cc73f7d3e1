"""The parts of rows before tokenisation: a prompt and its completions, or why a row has none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlhf_core.config.options import format_value
from rlhf_core.data.cache import flatten
from rlhf_core.data.columns import is_blank, kwargs_of, require_template, tools_of
from rlhf_core.data.report import Problems, Report, shorten
from rlhf_core.data.table import Table
from rlhf_core.errors import InputError
from rlhf_core.tokenizer.encoding import Encoder, Ints, Message, Turns, join

Row: TypeAlias = Mapping[str, Any]
FIELDS = "ignored_fields"


class Parts(NamedTuple):
    """What a row is made of."""

    prompt: Turns | None
    """None if the completions contain it."""
    completions: Sequence[Turns]
    """Those of `chosen` first; none of a row that is only a prompt."""
    doubled: bool = False
    """Whether a completion repeats the prompt, which will be put before it."""
    tools: Sequence[Any] | None = None
    """Of a conversation: the tools that it may call."""
    kwargs: Mapping[str, Any] | None = None
    """Of a conversation: variables for its chat template."""

    @property
    def chat(self) -> bool:
        """Whether any part is a conversation."""
        return any(not isinstance(part, str | None) for part in (self.prompt, *self.completions))

    def with_template_values(self, row: Row) -> Parts:
        """Add what the row of a conversation gives to its chat template. Raises InputError if it is invalid."""
        return self._replace(tools=tools_of(row), kwargs=kwargs_of(row)) if self.chat else self

    @property
    def has_blank(self) -> bool:
        """Whether a completion is only white space."""
        return any(map(is_blank, self.completions))


Parser: TypeAlias = Callable[[Row], Parts | None]
"""Makes the parts of a row; None if there is nothing to learn, or to score. Raises InputError for an invalid row."""


def parse_rows(table: Table, parse: Parser, problems: Problems) -> list[Parts | None]:
    """Parse every row. Raises InputError naming file and row of the first few problems, `problems` included."""
    parsed: list[Parts | None] = [None] * len(table.rows)
    for i, row in enumerate(table.rows):
        try:
            parsed[i] = parse(row)
        except InputError as error:
            problems.add(f"{table.where(i)}: {error}")
    problems.raise_if_any()
    return parsed


def raise_problems(problems: Sequence[str | None]) -> None:
    """Raise InputError for the problems of a row; None is none."""
    if any(problems):
        raise InputError("; ".join(filter(None, problems)))


def usable_rows(table: Table, parse: Parser, problems: Problems) -> NDArray[np.bool_]:
    """Tell which rows could teach something, bool [rows]. Raises InputError as `parse_rows` does."""
    return np.array([parts is not None for parts in parse_rows(table, parse, problems)], bool)


def read_numbers(
    table: Table, column: str, problems: Problems, missing: float | None = None
) -> NDArray[np.float64]:
    """Read a column of numbers, float64 [rows], NaN for an invalid one, which is added to `problems`.

    missing: as in `read_number`.
    """
    numbers = np.full(len(table.rows), math.nan)
    for i, row in enumerate(table.rows):
        try:
            numbers[i] = read_number(row, column, missing)
        except InputError as error:
            problems.add(f"{table.where(i)}: {error}")
    return numbers


def read_number(row: Row, column: str, missing: float | None = None) -> float:
    """Read a row's number. missing: of a row without one; None: raise InputError, as for an invalid one."""
    value = row.get(column)
    if missing is not None and value in (None, ""):
        return missing
    number = math.nan
    with suppress(TypeError, ValueError, OverflowError):
        number = math.nan if value is None or isinstance(value, bool) else float(value)
    if not abs(number) < 3e38:  # float32's largest; NaN too
        shown = "null" if value is None else format_value(value)
        raise InputError(f"'{column}' is {shown}, not a finite number")
    return number


def strip_prompt(
    prompt: str, texts: Sequence[tuple[str, str]], repeated: bool | None
) -> tuple[list[str], bool]:
    """Take the prompt off texts that begin with it if `repeated`, or say whether one of them repeats it.

    texts: (column, completion). repeated: `TextOptions.prompt_repeated`. Raises InputError for a text that does not
    begin with its prompt, where it should.
    """
    if not repeated:
        start = prompt.strip()
        doubled = bool(start) and any(text.lstrip().startswith(start) for _, text in texts)
        return [text for _, text in texts], doubled
    for name, text in texts:
        if not text.startswith(prompt):
            raise InputError(f"'prompt' is not the start of '{name}', as prompt_repeated = true says")
    return [text[len(prompt) :] for _, text in texts], False


def refuse_repeats(table: Table, doubled: Sequence[int], repeated: bool | None) -> None:
    """Raise InputError if most rows' completions repeat the prompt and `prompt_repeated` is not set.

    doubled: the rows that repeat it. repeated: `TextOptions.prompt_repeated`.
    """
    if repeated is None and len(doubled) * 2 > len(table.rows):
        rows = shorten([table.where(i) for i in doubled])
        raise InputError(
            f"{table.name}: in {len(doubled):,} of {len(table.rows):,} rows a completion begins with the text of its "
            f"prompt ({rows}): set prompt_repeated = true to take it off, or prompt_repeated = false if the model "
            "should read it twice"
        )


def doubled_rows(rows: Sequence[Parts | None]) -> list[int]:
    """List the rows of which a completion repeats the prompt."""
    return [i for i, parts in enumerate(rows) if parts is not None and parts.doubled]


class Notes:
    """Unusual rows of a table, by the name of the `Report` list they belong to."""

    def __init__(self, names: Sequence[str], count: int) -> None:
        """count: rows of the table."""
        self.rows = {name: np.zeros(count, bool) for name in names}
        self.fields: list[dict[str, None]] = [{} for _ in range(count)]
        """Of each row: fields of its messages that the chat template does not write."""

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return {name: bool [rows]}, and `flatten` of each row's fields as text."""
        fields = [np.frombuffer("\n".join(names).encode(), np.uint8) for names in self.fields]
        return {**self.rows, **flatten(FIELDS, fields, np.uint8)}

    def record(self, table: Table, report: Report) -> None:
        """Add the rows of a table to the report's lists."""
        for name, rows in self.rows.items():
            getattr(report, name).extend(table.where(i) for i in np.flatnonzero(rows).tolist())
        for i, names in enumerate(self.fields):
            report.add_ignored_fields(table.where(i), list(names))

    def add(self, name: str, i: int, applies: bool) -> None:
        self.rows[name][i] |= applies

    def add_unwritten(
        self,
        i: int,
        encoder: Encoder,
        turns: Sequence[Message],
        text: str,
        parts: Parts,
        learns: bool = False,
    ) -> None:
        """Note what the text that the template wrote of row i's messages lacks. learns: as in `ignored_fields`."""
        chat, tools, kwargs = encoder.chat, parts.tools, parts.kwargs
        self.add("left_out", i, chat.leaves_out(turns, text, tools))
        names = chat.ignored_fields(turns, text, tools=tools, kwargs=kwargs, learns=learns)
        self.fields[i] |= dict.fromkeys(names)


def for_each(
    table: Table, rows: Sequence[Parts | None], encoder: Encoder, write: Callable[[int, Parts], None]
) -> None:
    """Call `write` with the index and the parts of every row that has some.

    Raises InputError naming file and row of the first few for which it does, and where the tokenizer has no chat
    template for conversations.
    """
    if any(parts is not None and parts.chat for parts in rows):
        require_template(table, encoder)
    problems = Problems()
    for i, parts in enumerate(rows):
        if parts is None:
            continue
        try:
            write(i, parts)
        except InputError as error:
            problems.add(f"{table.where(i)}: {error}")
    problems.raise_if_any()


def encode_completions(
    table: Table, rows: Sequence[Parts | None], encoder: Encoder, notes: Notes
) -> list[list[Ints] | None]:
    """Tokenise each row's completions after its prompt, ended as a judged text is; None for a row without parts."""
    texts: list[tuple[str, bool]] = []
    chat: list[bool] = []

    def write(i: int, parts: Parts) -> None:
        wholes = [join(parts.prompt, completion) for completion in parts.completions]
        written: list[tuple[str, bool]] = []
        for whole in wholes:
            judged = encoder.judged_turns(whole)
            written.append(encoder.text(judged, tools=parts.tools, kwargs=parts.kwargs))
            if not isinstance(judged, str):
                notes.add("after_reply", i, len(judged) < len(whole))
                notes.add_unwritten(i, encoder, judged, written[-1][0], parts)
        texts.extend(written)
        chat.extend(not isinstance(whole, str) for whole in wholes)

    for_each(table, rows, encoder, write)
    ids = iter(encoder.tokenize_closed(texts, chat))
    return [None if parts is None else [next(ids) for _ in parts.completions] for parts in rows]
