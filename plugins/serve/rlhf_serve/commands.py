"""The command `rlhf serve`. What it needs is imported when it runs: `rlhf --help` imports this module."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlhf_core.runtime.flags import Plugins, Quantize


def _drain_seconds(text: str) -> float:
    """Parse the value of --drain-seconds."""
    from rlhf_core.config.durations import to_seconds

    number = text.replace(".", "", 1).isdecimal()
    try:
        return float(text if number else to_seconds(text))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--drain-seconds") from error


def serve(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Policies and reward models: artifacts, directories or hub names; NAME=MODEL names one.",
        ),
    ],
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = 8000,
    slots: Annotated[
        int,
        typer.Option("--slots", min=1, help="Completions that are sampled together; on a CPU at most 32."),
    ] = 32,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            "--max-model-len",
            min=8,
            help="Tokens of a prompt and its completion; default: what the model takes, at most 2,048.",
        ),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option("--chat-template", help='"plain" or a file, for policies; default: the tokenizer\'s.'),
    ] = None,
    quantize: Quantize = None,
    max_waiting: Annotated[
        int,
        typer.Option(
            "--max-waiting", min=1, help="Completions that run or wait; requests for more get status 429."
        ),
    ] = 1024,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            "--api-key-env", metavar="NAME", help="Environment variable with the key that clients send."
        ),
    ] = None,
    control: Annotated[
        bool, typer.Option("--control", help="Answer the routes that pause, and change weights.")
    ] = False,
    adapters: Annotated[
        Path | None,
        typer.Option("--adapters", metavar="DIR", help="Where adapters may be loaded from, with --control."),
    ] = None,
    max_adapters: Annotated[
        int,
        typer.Option("--max-adapters", min=1, help="Adapters of a policy; each holds a copy of its weights."),
    ] = 16,
    drain_seconds: Annotated[
        str,
        typer.Option(
            "--drain-seconds",
            metavar="X",
            help="How long requests may take to end after SIGTERM: seconds, or a duration such as 2m.",
        ),
    ] = "30",
    plugin: Plugins = None,
) -> None:
    """Serve models over HTTP. Policies complete prompts and chats, reward models score, as OpenAI's and vLLM's do."""
    from rlhf_serve.running import ServeSettings, run

    run(
        ServeSettings(
            models=models,
            host=host,
            port=port,
            slots=slots,
            length=max_model_len,
            most_waiting=max_waiting,
            key_name=api_key_env,
            control=control,
            adapters=adapters,
            most_adapters=max_adapters,
            drain_seconds=_drain_seconds(drain_seconds),
            plugins=tuple(plugin or ()),
            chat_template=chat_template,
            quantize=quantize,
        )
    )
