"""The command `rlhf`. Nothing heavy is imported before a command runs, so that `--help` is instant."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from rlhf_core import __version__, exits
from rlhf_core.command_options import (
    CompletionLength,
    ComponentKind,
    Devices,
    Merge,
    Normalize,
    Output,
    Page,
    Pipeline,
    Plugins,
    PromptRepeated,
    Raw,
    RepetitionPenalty,
    RunDirectory,
    SequenceLength,
    Sets,
    StopStrings,
    StopTokenIds,
    Temperature,
    Template,
    TemplateKwargs,
    TrainerName,
)
from rlhf_core.exits import BAD_INPUT as BAD_INPUT
from rlhf_core.exits import DONE as DONE
from rlhf_core.exits import FAILED as FAILED
from rlhf_core.exits import STOPPED as STOPPED
from rlhf_core.signals import stop_signals

app = typer.Typer(
    name="rlhf",
    help="Preference data into a better policy: SFT, reward models and RL as stages of one pipeline.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Exit codes: 0 done, 1 the run failed, 2 bad input or configuration, 75 stopped with its state saved.

    130 after a second Ctrl-C. In a job of several processes all end with one code, and one of them says why.
    """
    # Before anything heavy is imported: a signal is kept until the run can stop without a loss.
    with stop_signals() if sys.argv[1:2] in (["run"], ["train"]) else nullcontext():
        exits.run(app)


@app.callback(invoke_without_command=True)
def _rlhf(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(f"rlhf {__version__}")
        raise typer.Exit


@app.command()
def run(pipeline: Pipeline, sets: Sets = None, plugin: Plugins = None, dir: RunDirectory = None) -> None:
    """Run or continue a pipeline; finished stages are skipped."""
    from rlhf_core.pipeline import run_pipeline

    run_pipeline(pipeline, sets=sets or (), plugins=plugin or (), dir=dir)


@app.command()
def check(
    pipeline: Pipeline,
    sets: Sets = None,
    plugin: Plugins = None,
    dir: RunDirectory = None,
    devices: Devices = None,
) -> None:
    """Everything that is wrong with a pipeline, or what it would do. All at once, without a device."""
    from rlhf_core import commands

    commands.check(pipeline, sets=sets or (), plugins=plugin or (), dir=dir, devices=devices)


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
    """One stage from flags. rlhf train TRAINER --model DIR --train_data FILE [--FIELD VALUE]... --dir RUN

    The flags are the fields of the trainer's config: `rlhf train TRAINER --help` lists them. `--field value`,
    `--field=value`, `--some-field`, `--table.field` and a bare `--flag` are understood. Also --dir,
    --mesh.AXIS and --plugin FILE.py.
    """
    from rlhf_core import train_flags

    train_flags.train(trainer, context.args)


@app.command()
def score(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A reward model: an artifact, directory or hub name.")
    ],
    file: Annotated[Path, typer.Argument(metavar="INPUT.jsonl")],
    output: Output = None,
    normalize: Normalize = False,
    prompt_repeated: PromptRepeated = None,
    plugin: Plugins = None,
) -> None:
    """Add a reward model's scores to rows. `score` to answers, chosen_score and rejected_score to pairs."""
    from rlhf_core import commands

    commands.score(
        model, file, output, normalize=normalize, prompt_repeated=prompt_repeated, plugins=plugin or ()
    )


@app.command()
def export(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="An artifact, a directory, an adapter of PEFT or a hub name."),
    ],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new directory.")],
    merge: Merge = False,
    plugin: Plugins = None,
) -> None:
    """Write MODEL for transformers, PEFT and vLLM. In Hugging Face layout, as they open it."""
    from rlhf_core import commands

    commands.export(model, directory, merge=merge, plugins=plugin or ())


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
    max_prompt_length: Annotated[int, typer.Option("--max_prompt_length", min=1, help="Tokens.")] = 512,
    temperature: Temperature = 1.0,
    top_p: Annotated[float, typer.Option("--top_p", min=0.0, max=1.0)] = 1.0,
    top_k: Annotated[int | None, typer.Option("--top_k", min=1)] = None,
    min_p: Annotated[float | None, typer.Option("--min_p", min=0.0, max=1.0)] = None,
    repetition_penalty: RepetitionPenalty = 1.0,
    stop_strings: StopStrings = None,
    stop_token_ids: StopTokenIds = None,
    num_generations: Annotated[
        int, typer.Option("--num_generations", min=1, help="Completions a prompt.")
    ] = 1,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    chat_template: Template = None,
    chat_template_kwargs: TemplateKwargs = None,
    raw: Raw = False,
    plugin: Plugins = None,
) -> None:
    """Completions of prompts. Plain text for --prompt, rows with `completion` for a file or with -o."""
    from rlhf_core import commands

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
        raw=raw,
        plugins=plugin or (),
    )


@app.command(context_settings={"token_normalize_func": lambda name: name.replace("-", "_")})
def data(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A file, or the name of a `datasets` dataset.")],
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", metavar="DIR", help="Default: characters are counted.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="DIR", help="With its tokenizer.")] = None,
    max_sequence_length: SequenceLength = None,
    chat_template: Template = None,
    plugin: Plugins = None,
) -> None:
    """What a dataset holds. Its format, lengths, what would be filtered, and which rows to look at."""
    from rlhf_core import commands

    commands.profile(
        file,
        tokenizer,
        model,
        max_length=max_sequence_length,
        chat_template=chat_template,
        plugins=plugin or (),
    )


@app.command()
def new(
    kind: ComponentKind,
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="Such as my-loss.")],
    dir: Annotated[Path | None, typer.Option("--dir", help="A new one; default: rlhf-NAME here.")] = None,
) -> None:
    """Write a package for a component of yours. It installs, and passes its tests; change it from there."""
    from rlhf_core import commands

    commands.new(kind, name, dir)


@app.command()
def plugins(
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False, plugin: Plugins = None
) -> None:
    """Every installed distribution and what it registers. With its version and state."""
    from rlhf_core import commands

    commands.plugins(as_json=json, files=plugin or [])


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)],
    output: Page = None,
) -> None:
    """Write one HTML page about a run. Curves, distributions, completions, timing, configuration."""
    from rlhf_core import report as reporting

    _tell_page(reporting.report(run, output))


@app.command()
def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN RUN...", help="Run directories.", show_default=False)
    ],
    output: Page = None,
) -> None:
    """Write one HTML page about several runs. Their curves lie on top of each other."""
    from rlhf_core import report as reporting

    _tell_page(reporting.compare(runs, output))


def _tell_page(path: Path) -> None:
    from rlhf_core.terminal import echo

    echo(f"{path}: {path.stat().st_size / 1e6:.2f} MB, open it in a browser")


if __name__ == "__main__":
    main()
