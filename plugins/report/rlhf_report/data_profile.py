"""The profile of a dataset, before training on it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table as TextTable

from rlhf_core import data
from rlhf_core.config.toml import to_value
from rlhf_core.data import preferences, prompts, texts
from rlhf_core.data.columns import mapping_hint, propose_columns
from rlhf_core.data.report import Report, shorten
from rlhf_core.data.table import Records, Table
from rlhf_core.errors import InputError, suggest
from rlhf_core.tokenizer.options import TextOptions

LIMITS = {"pairs": 1024, "texts": 1024, "prompts": 512}
"""The trainers' defaults for `max_sequence_length`, and for prompts `max_prompt_length`."""
PERCENTILES = (5, 50, 95, 99)


@dataclass(frozen=True)
class Profile:
    """Statistics of a dataset."""

    name: str
    format: str
    """The columns that are read and what they hold."""
    columns: tuple[str, ...]
    unit: str
    """Unit of all lengths: "tokens", or "characters" without a tokenizer."""
    report: Report
    """Made without a limit, so that nothing is filtered."""
    lengths: dict[str, NDArray[np.int64]]
    """Lengths of the rows that are not empty, by part; `limit` applies to the last part."""
    limit: int
    """Maximum tokens per row."""
    over: list[str]
    """Names of the rows over the limit, such as "prefs.jsonl row 17"; empty if the unit is characters."""
    facts: dict[str, str]


def profile(
    records: Records,
    tokenizer: Any = None,
    *,
    max_length: int | None = None,
    chat_template: str | None = None,
) -> Profile:
    """Measure preferences, demonstrations or prompts, depending on the columns.

    tokenizer: None counts characters, with the template "plain" for conversations; token ids count as tokens.
    Raises InputError if no trainer reads the columns, and naming the file and row of the first few problems.
    """
    kind = _kind(records)
    pretokenised = kind == "pairs" and all(map(preferences.id_columns, records.tables))
    unit = "characters" if tokenizer is None and not pretokenised else "tokens"
    if unit == "characters":
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it advises to install PyTorch
        tokenizer = Characters()
        chat_template = chat_template or "plain"
    # Trainers refuse files whose completions repeat their prompts; here they are only counted.
    options = TextOptions(chat_template, prompt_repeated=False)
    examples, lengths, facts = _MEASURES[kind](records, tokenizer, options, unit)
    if unit == "characters":
        examples.report.untemplated.clear()  # the model is unknown
    columns = {} if kind == "pairs" else _as_pairs(records)
    if columns:
        facts["preferences?"] = f"columns = {to_value(columns)} reads them as pairs"
    limit = LIMITS[kind] if max_length is None else max_length
    longest = list(lengths.values())[-1]
    over = [examples.where(i) for i in np.flatnonzero(longest > limit).tolist()] if unit == "tokens" else []
    formats = dict.fromkeys(_format(table, kind) for table in records.tables)
    return Profile(
        records.name, "; ".join(formats), records.columns, unit, examples.report, lengths, limit, over, facts
    )


Measured = tuple[data.Examples, dict[str, NDArray[np.int64]], dict[str, str]]


def _measure_pairs(records: Records, tokenizer: Any, template: TextOptions, unit: str) -> Measured:
    pairs = data.encode_pairs(records, tokenizer, max_length=None, chat_template=template)
    start = pairs.prefixes
    chosen, rejected = (pairs.sequence_lengths - start[:, None]).T
    longer = float(np.mean(chosen > rejected))
    ties = float(np.mean(chosen == rejected))
    apart = int((2 * start + chosen + rejected).sum())
    facts = {
        "longer wins": f"chosen is longer in {percent(longer)} of the pairs, as long in {percent(ties)}",
        "shared start": f"{apart:,} {unit} as two sequences per pair, {apart - int(start.sum()):,} with the start "
        f"they share once: {percent(start.sum() / apart)} saved",
    }
    margins = pairs.values["margin"]
    if margins.any():
        facts["margin"] = (
            f"{margins.min():g} to {margins.max():g}, 0 in {int((margins == 0).sum()):,} of {len(margins):,} pairs"
        )
    lengths = {
        "shared start": start,
        "chosen, after it": chosen,
        "rejected, after it": rejected,
        "longer of the two": start + np.maximum(chosen, rejected),
    }
    return pairs, lengths, facts


def _measure_texts(records: Records, tokenizer: Any, template: TextOptions, unit: str) -> Measured:
    demonstrations = data.encode_texts(records, tokenizer, max_length=None, chat_template=template)
    whole = demonstrations.lengths
    learned = np.array([np.count_nonzero(mask) for mask in demonstrations.learned or ()])
    facts = {
        "learned": f"{learned.sum():,} of {whole.sum():,} {unit}, {percent(learned.sum() / whole.sum())}"
    }
    lengths = {"learned": learned, "whole": whole}
    return demonstrations, lengths, facts


def _measure_prompts(records: Records, tokenizer: Any, template: TextOptions, unit: str) -> Measured:
    encoded = data.encode_prompts(records, tokenizer, max_prompt_length=None, chat_template=template)
    names = ", ".join(encoded.columns) or "no other column"
    return encoded, {"prompt": encoded.lengths}, {"for rewards": names}


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


_MEASURES = {"pairs": _measure_pairs, "texts": _measure_texts, "prompts": _measure_prompts}


def _kind(records: Records) -> str:
    columns = set(records.columns)
    if {"chosen", "rejected"} <= columns or any(map(preferences.id_columns, records.tables)):
        return "pairs"
    if columns & {"text", "messages", "completion"}:
        return "texts"
    if "prompt" in columns:
        return "prompts"
    known = {"prompt", "chosen", "rejected", "messages", "text", "completion"}
    formats = (*preferences.FORMATS, *texts.FORMATS, *prompts.FORMATS)
    hints = "".join(dict.fromkeys(_look(table, *formats) for table in records.tables))
    hints = hints or "".join(suggest(column, known) for column in records.columns)
    raise InputError(
        f"{records.name} has no column that a trainer reads; it has {', '.join(records.columns)}.{hints} "
        f"Preferences: {preferences.ACCEPTED}. Demonstrations: {texts.ACCEPTED}. Prompts: {prompts.ACCEPTED}"
    )


def _look(table: Table, *formats: tuple[str, ...]) -> str:
    """Return `mapping_hint`, and the command that looks at the rows with these columns."""
    hint = mapping_hint(table, *formats)
    columns = propose_columns(table, *formats)
    if not columns:
        return hint
    command = f"rlhf data {shlex.quote(table.name)} --columns {shlex.quote(to_value(columns))}"
    return f"{hint} To look at them first: {command}."


def _as_pairs(records: Records) -> dict[str, str | list[str]]:
    """Return the `columns` that make demonstrations or prompts preferences, as other columns' names propose; or {}."""
    columns = propose_columns(records.tables[0], *preferences.FORMATS)
    if columns and "messages" in records.columns:
        columns = {"prompt": "messages", **columns}
    return columns


def _format(table: Table, kind: str) -> str:
    family = preferences.id_columns(table) if kind == "pairs" else ()
    if family:
        return f"preferences: {' + '.join(family)}, token ids"
    what = {"pairs": "preferences", "texts": "demonstrations", "prompts": "prompts"}[kind]
    wanted = texts.read_columns(table) if kind == "texts" else ("prompt", "chosen", "rejected")
    columns = [name for name in wanted if name in table.columns]
    chats = [name for name in columns if table.kind(name).chat]
    if not chats:
        holds = "texts"
    elif chats == columns:
        holds = "conversations"
    else:
        holds = f"{', '.join(chats)}: conversations"
    return f"{what}: {' + '.join(columns)}, {holds}"


def render(profile: Profile) -> Group:
    """Format the statistics as tables, at most 80 columns wide unless names are long."""
    overview = TextTable(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    overview.add_column(style="bold", no_wrap=True)
    overview.add_column(overflow="fold")
    counts, *problems = profile.report.lines()
    overview.add_row("data", profile.name)
    overview.add_row("format", profile.format)
    overview.add_row("columns", ", ".join(profile.columns))
    overview.add_row("rows", "\n".join([counts, *problems]))
    if profile.unit == "tokens":
        setting = "max_prompt_length" if profile.report.unit == "prompts" else "max_sequence_length"
        rows = f"{len(profile.over):,} filtered: {shorten(profile.over)}" if profile.over else "all fit"
        overview.add_row("limit", f"{setting} = {profile.limit}: {rows}")
    for name, fact in profile.facts.items():
        overview.add_row(name, fact)
    return Group(overview, _length_table(profile.unit, profile.lengths))


def _length_table(unit: str, lengths: Mapping[str, NDArray[np.int64]]) -> TextTable:
    table = TextTable(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(unit)
    for name in ("mean", "min", *(f"{p} %" for p in PERCENTILES), "max"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, values in lengths.items():
        figures = [values.mean(), values.min(), *np.percentile(values, PERCENTILES), values.max()]
        table.add_row(name, *(f"{figure:,.0f}" for figure in figures))
    return table


class Characters:
    """A stand-in for a missing tokenizer: every character is a token."""

    eos_token_id = bos_token_id = pad_token_id = chat_template = name_or_path = None
    special_tokens_map: Mapping[str, str] = {}

    def __call__(self, text: str | Sequence[str], **_: Any) -> dict[str, Any]:
        if isinstance(text, str):
            return {"input_ids": _code_points(text), "offset_mapping": [(i, i + 1) for i in range(len(text))]}
        return {"input_ids": [_code_points(part) for part in text]}

    def __len__(self) -> int:
        return 0x110000


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)
