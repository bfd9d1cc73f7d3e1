"""The commands `rlhf report`, `compare`, `watch` and `data`. What they need is imported when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlhf_core.errors import InputError
from rlhf_core.runtime.flags import Plugins

Page = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="FILE.html",
        help="Default: RUN/report.html; for several runs, compare.html here.",
    ),
]


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)],
    output: Page = None,
) -> None:
    """Write one HTML page about a run. Curves, distributions, completions, timing, configuration."""
    import rlhf_report
    from rlhf_core.runtime.files import require_writable

    require_writable(output)
    _print_page(rlhf_report.report(run, output))


def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN RUN...", help="Run directories.", show_default=False)
    ],
    output: Page = None,
) -> None:
    """Write one HTML page about several runs. It overlays their curves."""
    import rlhf_report
    from rlhf_core.runtime.files import require_writable

    require_writable(Path("compare.html") if output is None else output)
    _print_page(rlhf_report.compare(runs, output))


def watch(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[DIR...]",
            help="Run directories, and directories of runs; default: the current one.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = 8080,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            "--api-key-env",
            metavar="NAME",
            help="Environment variable with the key that the page asks for; needed for a --host elsewhere.",
        ),
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="A table in this terminal instead of a page.")] = False,
) -> None:
    """Watch runs on a live page. It shows their curves, completions and tokens, and may start at any time."""
    given = directories or [Path(".")]
    for directory in given:
        if directory.is_file():
            raise InputError(f"{directory}: is a file; give the directory of a run, such as runs/first")
    if text:
        from rlhf_report.watch.table import show

        show(given)
        return
    from rlhf_report.watch.server import serve

    serve(given, host, port, api_key_env)


def data(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A file, or the name of a `datasets` dataset.")],
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", metavar="DIR", help="Counts tokens; default: characters.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="DIR", help="Use its tokenizer.")] = None,
    max_sequence_length: Annotated[
        int | None,
        typer.Option(
            "--max_sequence_length", "--max-sequence-length", min=1, help="Tokens; default: the trainers'."
        ),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(
            "--chat_template", "--chat-template", help='"plain" or a file; default: the tokenizer\'s.'
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="TABLE",
            help="What columns are called in the data, as in a stage: '{ chosen = \"good\" }'.",
        ),
    ] = None,
    first: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Read the first N rows alone, as of a stream.")
    ] = None,
    plugin: Plugins = None,
) -> None:
    """Profile a dataset. Its format, its lengths, what would be filtered, and which rows to look at."""
    from rlhf_core import data, plugins
    from rlhf_core.config import parse_value
    from rlhf_core.hub import is_hub_name, parse
    from rlhf_core.runtime.terminal import show
    from rlhf_core.tokenizer import load_tokenizer
    from rlhf_report import data_profile

    if tokenizer is not None and model is not None:
        raise InputError("rlhf data: give --tokenizer or --model, not both")
    source = model if tokenizer is None else tokenizer
    loaded = None if source is None else load_tokenizer(source)
    registry = plugins.load(files=plugin or ()).registry
    names = None if columns is None else parse_value(columns)
    if first is None:
        records = data.load(file, registry=registry, columns=names)
    else:
        from rlhf_core.data.streams import first_rows, open_streams

        is_file = Path(file).exists() or (is_hub_name(file) and parse(file).file is not None)
        spec = {"path" if is_file else "name": file, "streaming": True}
        records = first_rows(open_streams(spec, registry=registry, columns=names), first)
    profile = data_profile.profile(
        records, loaded, max_length=max_sequence_length, chat_template=chat_template
    )
    if first is not None:
        show(f"the first {len(records):,} rows:\n")
    show(data_profile.render(profile))


def _print_page(path: Path) -> None:
    from rlhf_core.runtime.terminal import echo

    echo(f"{path}: {path.stat().st_size / 1e6:.2f} MB, open it in a browser")
