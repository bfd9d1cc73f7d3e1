"""Declare `rlhf score`; what it needs is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Plugins = Annotated[
    list[Path] | None,
    typer.Option("--plugin", metavar="FILE.py", help="A plugin that is not installed; repeatable."),
]
Output = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="OUT.jsonl", help="Default: standard output.")
]
Base = Annotated[
    str | None,
    typer.Option(
        "--base", metavar="DIR", help="MODEL's base, if it is an adapter; default: the one it names."
    ),
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
        str, typer.Argument(metavar="MODEL", help="A reward model: an artifact, directory or hub name.")
    ],
    file: Annotated[Path, typer.Argument(metavar="INPUT.jsonl")],
    output: Output = None,
    normalize: Normalize = False,
    chat: AsChat = False,
    subset: SubsetColumn = None,
    prompt_repeated: PromptRepeated = None,
    base: Base = None,
    plugin: Plugins = None,
) -> None:
    """Add a reward model's scores to rows. Prints the accuracy of pairs and best-of-n rows, by subset."""
    from rlhf_rewards.score import score as write_scores

    write_scores(
        model,
        file,
        output,
        normalize=normalize,
        prompt_repeated=prompt_repeated,
        chat=chat,
        subset=subset,
        base=base,
        plugins=plugin or (),
    )
