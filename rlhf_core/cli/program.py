"""Declare the commands of `rlhf` with their arguments and flags; each imports its implementation when it runs."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from rlhf_core import __version__
from rlhf_core.cli import exits
from rlhf_core.runtime.signals import stop_signals

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
Reuse = Annotated[
    Path | None,
    typer.Option(
        "--reuse",
        metavar="RUN",
        help="Take over finished stages of another run directory that match; the others train.",
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only", metavar="STAGE", help="Run this stage, whose inputs must be finished; repeatable."
    ),
]
Accept = Annotated[
    list[str] | None,
    typer.Option(
        "--accept",
        metavar="NAME",
        help="Continue with a reward or environment that has changed, such as rewards.judge; repeatable.",
    ),
]
Devices = Annotated[
    int | None,
    typer.Option(
        "--devices", min=1, metavar="N", help="Forecast memory per device on N devices, which need not exist."
    ),
]
On = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="DEVICES",
        help="Compile every program for these devices, which need not exist, such as h100:8, h200:2x8 or v5p:2x2x4.",
    ),
]
Pipeline = Annotated[Path, typer.Argument(metavar="PIPELINE.toml", show_default=False)]
Output = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="OUT.jsonl", help="Default: standard output.")
]
Template = Annotated[
    str | None, typer.Option("--chat_template", help='"plain" or a file; default: the tokenizer\'s.')
]


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise typer.BadParameter(f"{text!r} is not a JSON object, such as '{{\"enable_thinking\": false}}'")
    return value


TemplateKwargs = Annotated[
    dict | None,  # type: ignore[type-arg]  # typer takes no parameters of it
    typer.Option(
        "--chat_template_kwargs", metavar="JSON", parser=_json_object, help="Variables for the chat template."
    ),
]
Raw = Annotated[bool, typer.Option("--raw", help="Prompts are texts to continue, without the chat template.")]
RepetitionPenalty = Annotated[
    float, typer.Option("--repetition_penalty", help="Above 1: makes repeated tokens less likely.")
]
StopStrings = Annotated[
    list[str] | None, typer.Option("--stop_strings", metavar="TEXT", help="End a completion; repeatable.")
]
StopTokenIds = Annotated[
    list[int] | None, typer.Option("--stop_token_ids", min=0, help="Besides the model's own; repeatable.")
]
Merge = Annotated[
    bool, typer.Option("--merge", help="Merge adapters into the weights; default: write the adapters alone.")
]
Base = Annotated[
    str | None,
    typer.Option(
        "--base", metavar="DIR", help="MODEL's base, if it is an adapter; default: the one it names."
    ),
]
CompletionLength = Annotated[int, typer.Option("--max_completion_length", min=1, help="Tokens.")]
PromptLength = Annotated[
    int | None,
    typer.Option(
        "--max_prompt_length",
        min=1,
        help="Tokens that a prompt is cut to, with a warning; default: longer than the model's context is refused.",
    ),
]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0: the most likely token.")]
SequenceLength = Annotated[
    int | None, typer.Option("--max_sequence_length", min=1, help="Tokens; default: the trainers'.")
]
TrainerName = Annotated[
    str, typer.Argument(metavar="TRAINER", show_default=False, help="sft, reward, grpo, …")
]


app = typer.Typer(
    name="rlhf",
    cls=exits.Commands,
    help="Train a better policy from preference data: SFT, reward models and RL as stages of one pipeline.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run a command and exit: 0 done, 1 the run failed, 2 bad input or configuration, 75 stopped with its state saved.

    130 after a second Ctrl-C. All processes of a job end with the same code, and one of them says why.
    """
    # Before any heavy import: a signal waits until the run can stop without losing work.
    with stop_signals(exits=True) if sys.argv[1:2] in (["run"], ["train"]) else nullcontext():
        exits.run(app)


@app.callback(invoke_without_command=True)
def _rlhf(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(f"rlhf {__version__}")
        raise typer.Exit


@app.command()
def run(
    pipeline: Pipeline,
    sets: Sets = None,
    plugin: Plugins = None,
    dir: RunDirectory = None,
    reuse: Reuse = None,
    only: Only = None,
    accept: Accept = None,
) -> None:
    """Run or continue a pipeline; finished stages are skipped."""
    from rlhf_core.pipeline import run_pipeline

    run_pipeline(
        pipeline,
        sets=sets or (),
        plugins=plugin or (),
        dir=dir,
        accept=accept or (),
        reuse=reuse,
        only=only or (),
    )


@app.command()
def check(
    pipeline: Pipeline,
    sets: Sets = None,
    plugin: Plugins = None,
    dir: RunDirectory = None,
    reuse: Reuse = None,
    only: Only = None,
    accept: Accept = None,
    devices: Devices = None,
    on: On = None,
    suggest: Annotated[
        bool,
        typer.Option(
            "--suggest",
            help="With --on: search for a mesh and settings that fit, within 10 minutes; --on h100 takes the fewest "
            "devices of a machine.",
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="With --on: for programs.")] = False,
) -> None:
    """Print everything that is wrong with a pipeline, or what it would do. Uses no device."""
    from rlhf_core.cli import commands

    commands.check(
        pipeline,
        sets=sets or (),
        plugins=plugin or (),
        dir=dir,
        reuse=reuse,
        only=only or (),
        accept=accept or (),
        devices=devices,
        on=on,
        suggest=suggest,
        as_json=json,
    )


@app.command(
    context_settings={
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "allow_extra_args": True,
    }
)
def train(
    context: typer.Context,
    trainer: TrainerName,
) -> None:
    """Run one stage from flags. rlhf train TRAINER --model DIR --train_data FILE [--FIELD VALUE]... --dir RUN

    The flags are the fields of the trainer's config: `rlhf train TRAINER --help` lists them. `--field value`,
    `--field=value`, `--some-field`, `--table.field` and a bare `--flag` are accepted, as are --dir,
    --mesh.AXIS, --plugin FILE.py, --reuse RUN and --accept NAME.
    """
    from rlhf_core.cli import train

    train.train(trainer, context.args)


@app.command()
def export(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="An artifact, a directory, an adapter of PEFT or a hub name."),
    ],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new directory.")],
    merge: Merge = False,
    base: Base = None,
    plugin: Plugins = None,
) -> None:
    """Export MODEL for transformers, PEFT and vLLM. In Hugging Face layout."""
    from rlhf_core.cli import commands

    commands.export(model, directory, merge=merge, base=base, plugins=plugin or ())


@app.command(context_settings={"token_normalize_func": lambda name: name.replace("-", "_")})
def generate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A language model: artifact, directory or hub name.")
    ],
    file: Annotated[
        Path | None, typer.Argument(metavar="INPUT.jsonl", help="Rows with `prompt` or `messages`.")
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", metavar="TEXT", help="Repeatable.")] = None,
    output: Output = None,
    max_completion_length: CompletionLength = 256,
    max_prompt_length: PromptLength = None,
    temperature: Temperature = 1.0,
    top_p: Annotated[float, typer.Option("--top_p", min=0.0, max=1.0)] = 1.0,
    top_k: Annotated[int | None, typer.Option("--top_k", min=1)] = None,
    min_p: Annotated[float | None, typer.Option("--min_p", min=0.0, max=1.0)] = None,
    repetition_penalty: RepetitionPenalty = 1.0,
    stop_strings: StopStrings = None,
    stop_token_ids: StopTokenIds = None,
    num_generations: Annotated[
        int, typer.Option("--num_generations", min=1, help="Completions per prompt.")
    ] = 1,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**32 - 1)] = 0,
    chat_template: Template = None,
    chat_template_kwargs: TemplateKwargs = None,
    system: Annotated[
        str | None,
        typer.Option(
            "--system", metavar="TEXT", help="System message of prompts that have none of their own."
        ),
    ] = None,
    raw: Raw = False,
    base: Base = None,
    plugin: Plugins = None,
) -> None:
    """Sample completions of prompts. Plain text for --prompt, rows with `completion` for a file or with -o."""
    from rlhf_core.cli import commands

    sampling: dict[str, Any] = {
        "max_completion_length": max_completion_length,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "stop_strings": stop_strings or [],
        "stop_token_ids": stop_token_ids or [],
    }
    commands.generate(
        model,
        file,
        prompt or [],
        output,
        sampling=sampling,
        max_prompt_length=max_prompt_length,
        num_generations=num_generations,
        seed=seed,
        chat_template=chat_template,
        chat_template_kwargs=chat_template_kwargs,
        system=system,
        raw=raw,
        base=base,
        plugins=plugin or (),
    )


@app.command(context_settings={"token_normalize_func": lambda name: name.replace("-", "_")})
def data(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A file, or the name of a `datasets` dataset.")],
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", metavar="DIR", help="Counts tokens; default: characters.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="DIR", help="Use its tokenizer.")] = None,
    max_sequence_length: SequenceLength = None,
    chat_template: Template = None,
    plugin: Plugins = None,
) -> None:
    """Profile a dataset. Its format, its lengths, what would be filtered, and which rows to look at."""
    from rlhf_core.cli import commands

    commands.profile(
        file,
        tokenizer,
        model,
        max_length=max_sequence_length,
        chat_template=chat_template,
        plugins=plugin or (),
    )


@app.command()
def plugins(
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False, plugin: Plugins = None
) -> None:
    """List every installed distribution and what it registers. With its version and state."""
    from rlhf_core.cli import commands

    commands.plugins(as_json=json, files=plugin or [])


if __name__ == "__main__":
    main()
