"""`rlhf score`. What it needs is imported when it runs: `rlhf --help` imports this module."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rlhf_core.runtime.flags import Base, Plugins, Quantize

if TYPE_CHECKING:
    from rlhf_core.data import Records
    from rlhf_core.plugins.registry import Registry
    from rlhf_core.scoring import Scorer

Output = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="OUT.jsonl", help="Default: standard output.")
]
AsChat = Annotated[
    bool, typer.Option("--chat", help="Text prompts are a user's turn, their completions are replies.")
]
SubsetColumn = Annotated[
    str | None,
    typer.Option(
        "--subset", metavar="COLUMN", help="Column that names a row's subset; default: subset, if there."
    ),
]
PromptRepeated = Annotated[
    bool | None,
    typer.Option(
        "--prompt_repeated/--no_prompt_repeated",
        help="Whether completions begin with their prompt; default: as in MODEL's training.",
    ),
]
Normalize = Annotated[
    bool, typer.Option("--normalize", help="Use mean and standard deviation of MODEL's evaluation scores.")
]


def score(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A reward model: an artifact, directory, hub name or URL.")
    ],
    file: Annotated[str, typer.Argument(metavar="INPUT.jsonl")],
    output: Output = None,
    normalize: Normalize = False,
    chat: AsChat = False,
    subset: SubsetColumn = None,
    prompt_repeated: PromptRepeated = None,
    base: Base = None,
    quantize: Quantize = None,
    plugin: Plugins = None,
) -> None:
    """Add a reward model's scores to rows. Prints the accuracy of pairs and best-of-n rows, by subset."""
    from rlhf_core import data, plugins, runtime
    from rlhf_core.data.best_of_n import completion_lists
    from rlhf_core.runtime.files import open_stream, require_writable
    from rlhf_core.runtime.terminal import echo, for_reader, row_text
    from rlhf_core.scoring import warn_unread
    from rlhf_rewards.reward_bench import Summary, check_ties
    from rlhf_rewards.score import Unfinished, identity_of, prompts_as_turns, with_scores

    require_writable(output, Path(file))
    runtime.prepare()
    registry = plugins.load(files=plugin or ()).registry
    records = data.load(file, registry=registry)
    _require_column(records, subset)
    summary = Summary(subset or "subset")
    lists = [completion_lists(table) for table in records.tables]
    if any(lists) and summary.column in records.columns:
        check_ties(records, summary.column)
    scorer = _open_scorer(model, registry, normalize=normalize, base=base, quantize=quantize)
    read = data.Records([prompts_as_turns(table) for table in records.tables]) if chat else records
    _warn_untemplated(read, lists, scorer)
    stream = None if output is None else open_stream(output)
    unfinished = None
    unread: list[str] = []
    if output is not None and stream is None:
        settings = [model, normalize, base, quantize, prompt_repeated, chat]
        unfinished = Unfinished(output, identity_of(scorer, records, settings), scorer)
        summary.add(unfinished.open())
        if summary.rows:
            echo(f"{output}: resuming after {summary.rows:,} rows already scored", err=True)
        unread = unfinished.unread
    done = 0 if unfinished is None else unfinished.parts
    with stream or nullcontext():
        for part in scorer.score_parts(read, prompt_repeated=prompt_repeated, skip=done):
            scores, *_ = part.scores.values()  # each has a score of every row
            rows = with_scores(records[summary.rows : summary.rows + len(scores)], part)
            text = "".join(map(row_text, rows))
            if unfinished is not None:
                unfinished.write(text, part.unread)  # which adds to `unread`
            elif stream is not None:
                stream.write(text)
                unread += part.unread
            else:
                sys.stdout.write(for_reader(text))
                unread += part.unread
            summary.add(rows)
    if unfinished is not None:
        unfinished.finish()
    warn_unread(unread)
    for line in summary.lines():
        echo(line, err=unfinished is None)


def _require_column(records: Records, subset: str | None) -> None:
    """Raise InputError where the column that is asked for is not there."""
    from rlhf_core.errors import InputError, suggest

    if subset is not None and subset not in records.columns:
        raise InputError(
            f"--subset {subset}: {records.name} has no such column; it has {', '.join(records.columns)}."
            f"{suggest(subset, records.columns)}"
        )


def _open_scorer(
    model: str,
    registry: Registry,
    *,
    normalize: bool,
    base: str | None,
    quantize: Literal["nf4", "int8", "none"] | None,
) -> Scorer:
    """Load a reward model, or open the server of one."""
    from rlhf_core.errors import InputError
    from rlhf_core.plugins.urls import is_url, load_for_url
    from rlhf_core.scoring import Scorer

    if is_url(model):
        if quantize is not None:
            raise InputError("--quantize: has no effect on a model behind a URL; leave it out")
        served: Scorer = load_for_url("open_scorer")(model, normalize=normalize, base=base)
        return served
    scorer = Scorer.load(model, registry=registry, normalize=normalize, base=base, quantized=quantize)
    scorer.reuses_shapes = True  # as a server does, which has the same last bits
    return scorer


def _warn_untemplated(records: Records, lists: Sequence[str | None], scorer: Scorer) -> None:
    """Warn about plain texts, if the model's tokenizer has a chat template."""
    from rlhf_core.data.columns import skips_template

    for table, listed in zip(records.tables, lists, strict=True):
        names = [name for name in ("chosen", "rejected", "completion") if name in table.columns]
        names = [] if listed == "texts" else names
        if listed != "conversations" and skips_template(table, scorer.encoder, "prompt", *names):
            warnings.warn(
                f"{table.name}: plain texts skip the model's chat template, as if it was trained on such texts; for a "
                "chat model add --chat, which makes a user's turn of the prompt and a reply of each completion",
                stacklevel=3,
            )
