"""What a dataset holds, before anything is trained on it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from rlhf_core import data
from rlhf_core.data import preferences, prompts, texts
from rlhf_core.data.report import Report, shorten
from rlhf_core.data.source import Records, Source
from rlhf_core.errors import InputError, suggest
from rlhf_core.tokenizer.text_options import TextOptions

LIMITS = {"pairs": 1024, "texts": 1024, "prompts": 512}
"""What the trainers filter by where nothing else is set: `max_sequence_length`, `max_prompt_length` of prompts."""
PERCENTILES = (5, 50, 95, 99)


@dataclass(frozen=True)
class Profile:
    """The figures of a dataset."""

    name: str
    format: str
    """Which columns are read, and what they hold."""
    columns: tuple[str, ...]
    unit: str
    """Of all lengths: "tokens", or "characters" where there is no tokenizer."""
    report: Report
    """Without a limit: nothing is filtered in it."""
    lengths: dict[str, NDArray[np.int64]]
    """Of the rows that are not empty, by part. The last part is what `limit` is of."""
    limit: int
    """Tokens that a row may have."""
    over: list[str]
    """The rows that have more, such as "prefs.jsonl row 17"; none where the unit is not tokens."""
    facts: dict[str, str]


def profile(
    records: Records,
    tokenizer: Any = None,
    *,
    max_length: int | None = None,
    chat_template: str | None = None,
) -> Profile:
    """The figures of preferences, demonstrations or prompts, whichever the columns say.

    tokenizer: None counts characters, in conversations those of the template "plain"; of token ids, tokens.
    Raises InputError for what no trainer reads, and naming file and row of the first few problems.
    """
    kind = _kind(records)
    pretokenised = kind == "pairs" and all(_family(source) for source in records.sources)
    unit = "characters" if tokenizer is None and not pretokenised else "tokens"
    if unit == "characters":
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # to install PyTorch
        tokenizer, chat_template = Characters(), chat_template or "plain"
    # Counted and told here, where trainers refuse files whose completions repeat their prompts.
    options = TextOptions(chat_template, prompt_repeated=False)
    report, places, lengths, facts = _MEASURES[kind](records, tokenizer, options, unit)
    if unit == "characters":
        report.untemplated.clear()  # nobody has said which model they are for
    limit = LIMITS[kind] if max_length is None else max_length
    longest = list(lengths.values())[-1]
    over = [places[i] for i in np.flatnonzero(longest > limit).tolist()] if unit == "tokens" else []
    formats = dict.fromkeys(_format(source, kind) for source in records.sources)
    return Profile(
        records.name, "; ".join(formats), records.columns, unit, report, lengths, limit, over, facts
    )


Measured = tuple[Report, Sequence[str], dict[str, NDArray[np.int64]], dict[str, str]]


def _pairs(records: Records, tokenizer: Any, template: TextOptions, unit: str) -> Measured:
    found = data.encode_pairs(records, tokenizer, max_length=None, chat_template=template)
    trees = found.trees()
    start = trees.prefixes
    chosen, rejected = found.chosen.lengths - start, found.rejected.lengths - start
    longer, ties = float(np.mean(chosen > rejected)), float(np.mean(chosen == rejected))
    apart = int((2 * start + chosen + rejected).sum())
    facts = {
        "longer wins": f"chosen is longer in {percent(longer)} of the pairs, as long in {percent(ties)}",
        "shared start": f"{apart:,} {unit} as two sequences a pair, {apart - int(start.sum()):,} with the start "
        f"they share once: {percent(start.sum() / apart)} saved",
    }
    margins = found.margins
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
    return found.report, found.places, lengths, facts


def _texts(records: Records, tokenizer: Any, template: TextOptions, unit: str) -> Measured:
    found = data.encode_texts(records, tokenizer, max_length=None, chat_template=template)
    whole = found.tokens.lengths
    learned = np.array([np.count_nonzero(each) for each in found.learned])
    facts = {
        "learned": f"{learned.sum():,} of {whole.sum():,} {unit}, {percent(learned.sum() / whole.sum())}"
    }
    return found.report, found.places, {"learned": learned, "whole": whole}, facts


def _prompts(records: Records, tokenizer: Any, template: TextOptions, unit: str) -> Measured:
    found = data.encode_prompts(records, tokenizer, max_prompt_length=None, chat_template=template)
    names = ", ".join(found.columns)
    return (
        found.report,
        found.places,
        {"prompt": found.ids.lengths},
        {"for rewards": names or "no other column"},
    )


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


_MEASURES = {"pairs": _pairs, "texts": _texts, "prompts": _prompts}


def _kind(records: Records) -> str:
    columns = set(records.columns)
    if {"chosen", "rejected"} <= columns or any(_family(source) for source in records.sources):
        return "pairs"
    if columns & {"text", "messages", "completion"}:
        return "texts"
    if "prompt" in columns:
        return "prompts"
    known = {"prompt", "chosen", "rejected", "messages", "text", "completion"}
    hints = "".join(suggest(column, known) for column in records.columns)
    raise InputError(
        f"{records.name} has no column that a trainer reads; it has {', '.join(records.columns)}.{hints} "
        f"Preferences: {preferences.ACCEPTED}. Demonstrations: {texts.ACCEPTED}. Prompts: {prompts.ACCEPTED}"
    )


def _family(source: Source) -> tuple[str, str] | None:
    return next((family for family in preferences.FAMILIES if set(family) <= set(source.columns)), None)


def _format(source: Source, kind: str) -> str:
    if kind == "pairs" and (family := _family(source)):
        return f"preferences: {' + '.join(family)}, token ids"
    what = {"pairs": "preferences", "texts": "demonstrations", "prompts": "prompts"}[kind]
    wanted = texts.read_columns(source) if kind == "texts" else ("prompt", "chosen", "rejected")
    columns = [name for name in wanted if name in source.columns]
    chats = [name for name in columns if source.kind(name).chat]
    holds = (
        "texts"
        if not chats
        else "conversations"
        if chats == columns
        else f"{', '.join(chats)}: conversations"
    )
    return f"{what}: {' + '.join(columns)}, {holds}"


def render(found: Profile) -> Group:
    """The figures as tables of at most 80 columns where the dataset's names allow it."""
    said = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    said.add_column(style="bold", no_wrap=True)
    said.add_column(overflow="fold")
    counts, *problems = found.report.lines()
    said.add_row("data", found.name)
    said.add_row("format", found.format)
    said.add_row("columns", ", ".join(found.columns))
    said.add_row("rows", "\n".join([counts, *problems]))
    if found.unit == "tokens":
        setting = "max_prompt_length" if found.report.unit == "prompts" else "max_sequence_length"
        rows = f"{len(found.over):,} filtered: {shorten(found.over)}" if found.over else "all fit"
        said.add_row("limit", f"{setting} = {found.limit}: {rows}")
    for name, fact in found.facts.items():
        said.add_row(name, fact)
    return Group(said, _lengths(found.unit, found.lengths))


def _lengths(unit: str, lengths: Mapping[str, NDArray[np.int64]]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(unit)
    for name in ("mean", "min", *(f"{p} %" for p in PERCENTILES), "max"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, values in lengths.items():
        figures = [values.mean(), values.min(), *np.percentile(values, PERCENTILES), values.max()]
        table.add_row(name, *(f"{figure:,.0f}" for figure in figures))
    return table


class Characters:
    """Stands in for a tokenizer that is not given: every character is a token."""

    eos_token_id = bos_token_id = pad_token_id = chat_template = name_or_path = None
    special_tokens_map: Mapping[str, str] = {}

    def __call__(self, text: str | Sequence[str], **_: Any) -> dict[str, Any]:
        if isinstance(text, str):
            return {"input_ids": _points(text), "offset_mapping": [(i, i + 1) for i in range(len(text))]}
        return {"input_ids": [_points(each) for each in text]}

    def __len__(self) -> int:
        return 0x110000


def _points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)
