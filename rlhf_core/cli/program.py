"""Declare the commands of `rlhf` with their arguments and flags; each imports what it needs when it runs."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

import rlhf_core.cli.exits as exits
from rlhf_core import __version__
from rlhf_core.runtime.flags import Plugins, takes
from rlhf_core.runtime.signals import stop_signals


@dataclass(frozen=True)
class PipelineOptions:
    """The arguments and flags that `rlhf run` and `rlhf check` share."""

    pipeline: Annotated[Path, typer.Argument(metavar="PIPELINE.toml", show_default=False)]
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="STAGE.FIELD=VALUE",
            help="Override a field, an entry of a list (policy.rewards[1].weight=2 or policy.rewards.1.weight=2), or "
            "`seed=1`; repeatable.",
        ),
    ] = None
    plugin: Plugins = None
    dir: Annotated[
        Path | None,
        typer.Option("--dir", metavar="RUN", help="Run directory; overrides the file's `dir`."),
    ] = None
    reuse: Annotated[
        Path | None,
        typer.Option(
            "--reuse",
            metavar="RUN",
            help="Reuse matching finished stages of another run directory; train the others.",
        ),
    ] = None
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="STAGE", help="Run this stage, whose inputs must be finished; repeatable."
        ),
    ] = None
    accept: Annotated[
        list[str] | None,
        typer.Option(
            "--accept",
            metavar="NAME",
            help="Accept a changed reward or environment, such as rewards.judge, and continue; repeatable.",
        ),
    ] = None

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of `run_pipeline` and of `check`."""
        lists = {"sets": self.sets, "plugins": self.plugin, "only": self.only, "accept": self.accept}
        return {name: given or () for name, given in lists.items()} | {"dir": self.dir, "reuse": self.reuse}


@dataclass(frozen=True)
class RunOptions(PipelineOptions):
    """The arguments and flags of `rlhf run`."""

    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", help="Show every metric of an evaluation, not only four, and what was compiled."
        ),
    ] = False


@dataclass(frozen=True)
class CheckOptions(PipelineOptions):
    """The arguments and flags of `rlhf check`."""

    devices: Annotated[
        int | None,
        typer.Option(
            "--devices",
            min=1,
            metavar="N",
            help="Forecast memory per device on N devices, which need not exist.",
        ),
    ] = None
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            metavar="DEVICES",
            help="Compile every program for these devices, which need not exist, such as h100:8, h200:2x8 or "
            "v5p:2x2x4.",
        ),
    ] = None
    json: Annotated[bool, typer.Option("--json", help="With --on: print JSON.")] = False


app = typer.Typer(
    name="rlhf",
    cls=exits.Commands,
    help="Train a better policy from preference data: SFT, reward models and RL as stages of one pipeline.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run a command and exit: 0 done, 1 the run failed, 2 bad input or configuration, 75 stopped with its state saved.

    130 after a second Ctrl-C. All processes of a job end with the same code, and one of them says why.
    """
    # Before jaxlib is imported. Its compiler answers two minutes of work with a page that asks for a report of a bug;
    # what fails in it is raised in Python, too.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
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
@takes(RunOptions)
def run(given: RunOptions) -> None:
    """Run or continue a pipeline; finished stages are skipped."""
    from rlhf_core.pipeline import run_pipeline

    run_pipeline(given.pipeline, **given.arguments(), verbose=given.verbose)


@app.command()
@takes(CheckOptions)
def check(given: CheckOptions) -> None:
    """Report all errors of a pipeline, or print its plan. Uses no device."""
    from rlhf_core.pipeline.check import Target, check

    target = Target(given.devices, given.on, given.json)
    check(given.pipeline, **given.arguments(), target=target)


@app.command(
    context_settings={
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "allow_extra_args": True,
    }
)
def train(
    context: typer.Context,
    trainer: Annotated[
        str, typer.Argument(metavar="TRAINER", show_default=False, help="sft, reward, grpo, …")
    ],
) -> None:
    """Run one stage from flags. rlhf train TRAINER --model DIR --train_data FILE [--FIELD VALUE]... --dir RUN

    The flags are the fields of the trainer's config: `rlhf train TRAINER --help` lists them. `--field value`,
    `--field=value`, `--some-field`, `--table.field` and a bare `--flag` are accepted, as are --dir,
    --mesh.AXIS, --plugin FILE.py, --reuse RUN, --accept NAME and --verbose, as of `rlhf run`.
    """
    import rlhf_core.cli.train as train

    train.train(trainer, context.args)


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", show_default=False, help="A run directory.")],
    stage: Annotated[
        str | None, typer.Option("--stage", metavar="STAGE", help="Default: the last one that samples.")
    ] = None,
    to: Annotated[
        int | None, typer.Option("--to", metavar="N", min=1, help="The last update; default: all.")
    ] = None,
    plugin: Plugins = None,
) -> None:
    """Train a stage again from its journal, bit for bit. Without sampling; compares metrics and weights."""
    from rlhf_core.pipeline import replay as replays

    replays.report(replays.replay(run, stage, to, plugin or ()))


@app.command()
def plugins(
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False, plugin: Plugins = None
) -> None:
    """List every installed distribution and what it registers. With its version and state."""
    import dataclasses
    import json

    from rich.table import Table

    from rlhf_core import plugins
    from rlhf_core.cli.extensions import with_commands
    from rlhf_core.runtime.terminal import echo, show

    infos = with_commands(plugins.load(files=plugin or ()).plugins)
    if as_json:
        echo(json.dumps([dataclasses.asdict(info) for info in infos], indent=2, default=str))
        return
    table = Table(show_lines=True, expand=False)
    for column in ("distribution", "version", "state", "registers"):
        table.add_column(column, overflow="fold")
    for info in infos:
        registered = [f"{kind}: {', '.join(names)}" for kind, names in info.components.items()]
        about = str(info.error) if info.error else "\n".join(registered)
        table.add_row(info.distribution or info.name, info.version or "", info.state, about)
    show(table)


if __name__ == "__main__":
    main()
