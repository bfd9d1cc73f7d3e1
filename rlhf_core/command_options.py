"""Arguments and flags that commands take: those shared by several, and those with much to say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

Plugins = Annotated[
    list[Path] | None,
    typer.Option("--plugin", metavar="FILE.py", help="A plugin that is not installed; repeatable."),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="STAGE.FIELD=VALUE",
        help="Override a field, an entry of a list (policy.rewards[1].weight=2 or policy.rewards.1.weight=2), or "
        "`seed=1`; repeatable.",
    ),
]
RunDirectory = Annotated[
    Path | None, typer.Option("--dir", metavar="RUN", help="Run directory, in place of the file's `dir`.")
]
Devices = Annotated[
    int | None,
    typer.Option(
        "--devices", min=1, metavar="N", help="Tell the memory of each of N devices; they need not be here."
    ),
]
Pipeline = Annotated[Path, typer.Argument(metavar="PIPELINE.toml", show_default=False)]
Output = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="OUT.jsonl", help="Default: standard output.")
]
Page = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="FILE.html",
        help="Default: RUN/report.html; of several runs, compare.html here.",
    ),
]
ComponentKind = Annotated[
    str,
    typer.Argument(
        metavar="KIND",
        show_default=False,
        help="policy-loss, pairwise-loss, advantage, reward, trainer or logger.",
    ),
]
Template = Annotated[
    str | None, typer.Option("--chat_template", help='"plain" or a file; default: the tokenizer\'s.')
]


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise typer.BadParameter(f"{text!r} is no JSON object, such as '{{\"enable_thinking\": false}}'")
    return found


TemplateKwargs = Annotated[
    dict | None,  # type: ignore[type-arg]  # typer takes no parameters of it
    typer.Option(
        "--chat_template_kwargs", metavar="JSON", parser=_json_object, help="Variables for the chat template."
    ),
]
Raw = Annotated[bool, typer.Option("--raw", help="Prompts are texts to continue, without the chat template.")]
PromptRepeated = Annotated[
    bool | None,
    typer.Option(
        "--prompt_repeated/--no_prompt_repeated",
        help="Whether completions begin with their prompt; default: as in MODEL's training.",
    ),
]
RepetitionPenalty = Annotated[
    float, typer.Option("--repetition_penalty", help="Above 1: fewer tokens that were there before.")
]
StopStrings = Annotated[
    list[str] | None, typer.Option("--stop_strings", metavar="TEXT", help="Ends a completion; repeatable.")
]
StopTokenIds = Annotated[
    list[int] | None, typer.Option("--stop_token_ids", min=0, help="Besides the model's own; repeatable.")
]
Normalize = Annotated[
    bool, typer.Option("--normalize", help="Less the mean and over the deviation on MODEL's evaluation data.")
]
Merge = Annotated[
    bool, typer.Option("--merge", help="Adapters into the weights, in place of the adapters alone.")
]
CompletionLength = Annotated[int, typer.Option("--max_completion_length", min=1, help="Tokens.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0: the likeliest token.")]
SequenceLength = Annotated[
    int | None, typer.Option("--max_sequence_length", min=1, help="Tokens; default: the trainers'.")
]
TrainerName = Annotated[
    str, typer.Argument(metavar="TRAINER", show_default=False, help="sft, reward, grpo, …")
]
