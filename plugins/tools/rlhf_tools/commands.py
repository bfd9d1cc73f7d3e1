"""Declare the commands; what they need is imported when they run: `rlhf --help` imports this module."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from rlhf_core.runtime.flags import Base, Plugins


def demo(
    seed: Annotated[int, typer.Option("--seed", help="Of the data and of all stages.")] = 0,
    shuffle_labels: Annotated[
        bool, typer.Option("--shuffle-labels", help="Prefer either reply at random: a control.")
    ] = False,
    dir: Annotated[
        Path | None,
        typer.Option("--dir", metavar="RUN", help="Run directory; default: runs/quickstart-seedSEED."),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            "--write", metavar="DIR", help="Only write the data and the pipeline file, to change and run."
        ),
    ] = None,
) -> None:
    """Train a policy from preferences, in some minutes on a CPU. The same command resumes.

    SFT on demonstrations, a reward model on pairs, GRPO against it; then a table of what changed.
    """
    from rich.console import Console

    from rlhf_core.runtime.terminal import echo
    from rlhf_tools.demo import run

    if write is not None:
        pipeline = shlex.quote(str(run.prepare(write, seed, shuffle_labels)))
        echo(f"{write}: data/ and quickstart.toml\nnext: rlhf check {pipeline}; rlhf run {pipeline}")
        return

    from rlhf_tools.demo.table import closing_table

    name = f"quickstart-seed{seed}{'-shuffled' if shuffle_labels else ''}"
    directory = dir or Path("runs") / name
    summary = run.demo(directory, seed=seed, shuffle_labels=shuffle_labels)
    Console(highlight=False).print(closing_table(summary, directory))


Output = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="FILE", help="Default: standard output.")
]


def schema(output: Output = None) -> None:
    """Print a JSON schema of pipeline files, for editors. With the components of the installed plugins.

    A pipeline whose first line is `#:schema pipeline.schema.json` is completed and checked by editors that use taplo.
    """
    import json

    from rlhf_core import plugins
    from rlhf_core.artifacts import write_atomic
    from rlhf_core.runtime.terminal import echo
    from rlhf_tools.schema import pipeline_schema

    text = json.dumps(pipeline_schema(plugins.load().registry), indent=2)
    if output is None:
        echo(text)
        return
    write_atomic(output, text + "\n")
    echo(f"{output}: put `#:schema {output}` on the first line of a pipeline, relative to it", err=True)


def doctor(
    pipeline: Annotated[
        Path | None,
        typer.Argument(metavar="[PIPELINE.toml]", help="A pipeline: what it needs that is not installed."),
    ] = None,
) -> None:
    """Print what is installed and what is wrong. Exit code 1 if something is.

    Versions, devices, memory, plugins, commands, the cache of compiled programs, disk; of a pipeline, the distributions
    of this suite that its trainers, rewards, loggers, kernels and models come with.
    """
    from rlhf_core import RunError
    from rlhf_core.runtime.terminal import echo
    from rlhf_tools.doctor import examine, of_pipeline

    findings = [*examine(), *(() if pipeline is None else of_pipeline(pipeline))]
    for finding in findings:
        echo(f"{finding.name:<18} {finding.value}")
    problems = [finding.problem for finding in findings if finding.problem]
    if problems:
        raise RunError("\n".join(["", *problems]))
    echo("\nnothing is wrong")


def export(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="An artifact, a directory, an adapter of PEFT or a hub name."),
    ],
    directory: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="A new directory; with --push it may be left out.")
    ] = None,
    merge: Annotated[
        bool,
        typer.Option("--merge", help="Merge adapters into the weights; default: write the adapters alone."),
    ] = False,
    untied: Annotated[
        bool,
        typer.Option("--untied", help="Write an output head apart from the embeddings that it shares."),
    ] = False,
    base: Base = None,
    push: Annotated[
        str | None,
        typer.Option(
            "--push", metavar="USER/NAME", help="Upload it to the Hugging Face hub, with a model card."
        ),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="With --push: make a private repository.")
    ] = False,
    revision: Annotated[
        str | None,
        typer.Option("--revision", metavar="BRANCH", help="With --push: the branch; default: main."),
    ] = None,
    plugin: Plugins = None,
) -> None:
    """Export MODEL for transformers, PEFT and vLLM. In Hugging Face layout; --push uploads it to the hub."""
    import tempfile

    from rlhf_core import InputError, plugins, runtime
    from rlhf_core.models.loading import local_directory
    from rlhf_core.runtime.terminal import echo
    from rlhf_tools import hub
    from rlhf_tools.export import export

    if push is None and (directory is None or private or revision is not None):
        raise InputError(
            "give DIR, a new directory, or --push USER/NAME"
            if directory is None
            else "--private and --revision need --push USER/NAME"
        )
    runtime.prepare()
    registry = plugins.load(files=plugin or ()).registry
    with tempfile.TemporaryDirectory(prefix="rlhf-export-") as temporary:
        target = directory or Path(temporary) / "model"
        said = export(model, target, registry=registry, merge=merge, untied=untied, base=base)
        if directory is not None:
            echo(f"{directory}: {said}")
        if push is None:
            return
        card = hub.model_card(local_directory(model), target, push)
        (target / hub.CARD).write_text(card, encoding="utf-8")
        echo(f"{push}: {said}\n{hub.push(target, push, private=private, revision=revision)}")
