"""The command `rlhf chat`. What it needs is imported when it runs: `rlhf --help` imports this module."""

from __future__ import annotations

from typing import Annotated

import typer

from rlhf_core.runtime.flags import Plugins, Quantize


def chat(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A language model: artifact, directory, hub name or URL."),
    ],
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="System message; /system changes it.")
    ] = None,
    max_completion_length: Annotated[
        int, typer.Option("--max_completion_length", min=1, help="Tokens of a reply.")
    ] = 512,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0: always the most likely token.")
    ] = 1.0,
    top_p: Annotated[float, typer.Option("--top_p", min=0.0, max=1.0)] = 1.0,
    top_k: Annotated[int | None, typer.Option("--top_k", min=1)] = None,
    min_p: Annotated[float | None, typer.Option("--min_p", min=0.0, max=1.0)] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**32 - 1)] = 0,
    chat_template: Annotated[
        str | None, typer.Option("--chat_template", help="A file; default: the tokenizer's.")
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            "--max_model_len",
            min=8,
            help="Tokens of a conversation, of a model here; as rlhf serve's --max-model-len.",
        ),
    ] = None,
    quantize: Quantize = None,
    plugin: Plugins = None,
) -> None:
    """Talk to a language model in the terminal. /help lists what can be typed; Ctrl-C stops a reply, twice leaves."""
    from rlhf_core.errors import InputError
    from rlhf_core.plugins.urls import is_url
    from rlhf_remote.chat import Dialogue, ReplySettings, Speaker, talk
    from rlhf_remote.models import Remote, refuse_flags, takes_chats

    if not 0 < top_p <= 1:
        raise InputError(f"--top_p {top_p:g}: give a number above 0, at most 1")
    settings = ReplySettings(max_completion_length, temperature, top_p, top_k, min_p, seed)
    if is_url(model):
        refuse_flags(
            {
                "--chat_template": chat_template,
                "--max_model_len": max_model_len,
                "--quantize": quantize,
                "--plugin": plugin,
            }
        )
        remote = Remote.open(model, "language_model")
        if not takes_chats(remote):
            raise InputError(f"{remote.name} has no chat template; complete texts with rlhf generate")
        talk(Dialogue(system), Speaker(remote, settings, remote.name))
        return
    from rlhf_remote.serving import require_language_model, served

    require_language_model(model)
    given = {"--chat-template": chat_template, "--max-model-len": max_model_len, "--quantize": quantize}
    flags = [part for flag, value in given.items() if value is not None for part in (flag, str(value))]
    for file in plugin or ():
        flags += ["--plugin", str(file)]
    with served(model, flags) as (address, key):
        remote = Remote.open(address, "language_model", key)
        if not takes_chats(remote):
            raise InputError(
                f"{model} has no chat template: give one, --chat_template FILE, or complete texts with rlhf generate"
            )
        talk(Dialogue(system), Speaker(remote, settings, model))
