"""Running a server in this process until it is told to stop."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlhf_http.listening import WebServer, close, listen, read_key

from rlhf_core import plugins, runtime
from rlhf_core.errors import InputError, RunError, counted
from rlhf_core.runtime.terminal import echo
from rlhf_serve.app import Server, make_app
from rlhf_serve.control import Control
from rlhf_serve.engine import Engine
from rlhf_serve.opening import Opening, ServedPolicy, ServedScorer, open_model


@dataclass(frozen=True)
class ServeSettings:
    """The arguments and flags of `rlhf serve`."""

    models: Sequence[str]
    host: str = "127.0.0.1"
    port: int = 8000
    slots: int = 32
    length: int | None = None
    most_waiting: int = 1024
    key_name: str | None = None
    control: bool = False
    adapters: Path | None = None
    most_adapters: int = 16
    drain_seconds: float = 30.0
    plugins: Sequence[Path] = ()
    chat_template: str | None = None
    quantize: Literal["nf4", "int8", "none"] | None = None


def run(settings: ServeSettings) -> None:
    """Open the models, and answer until SIGTERM or Ctrl-C; then drain. Raises InputError before anything is served."""
    key = read_key(settings.key_name)
    names = dict(map(named, settings.models))
    if len(names) < len(settings.models):
        raise InputError("two models have the same name; name them NAME=MODEL")
    if settings.adapters is not None and not settings.control:
        raise InputError("--adapters has no effect without --control, whose routes load them")
    if settings.adapters is not None and not settings.adapters.is_dir():
        raise InputError(f"--adapters {settings.adapters}: no such directory")
    listener = listen(settings.host, settings.port)
    runtime.prepare()
    registry = plugins.load(files=settings.plugins).registry
    opening = Opening(
        settings.slots,
        settings.length,
        registry,
        chat_template=settings.chat_template,
        quantize=settings.quantize,
    )
    models = {name: open_model(name, path, opening) for name, path in names.items()}
    server = make_server(models, settings, key)
    gc.collect()
    # Models and programs stay: a full collection that visited them would stop all answers.
    gc.freeze()
    asyncio.run(_serve(server, application(server, settings, opening), listener, settings.drain_seconds))


def make_server(
    models: dict[str, ServedPolicy | ServedScorer], settings: ServeSettings, key: str | None = None
) -> Server:
    """Make the server of opened models; its engine starts with the application."""
    engine = Engine([each.policy for each in models.values() if isinstance(each, ServedPolicy)])
    return Server(models, engine, key=key, most_waiting=settings.most_waiting)


def application(server: Server, settings: ServeSettings, opening: Opening) -> Any:
    """Make the ASGI application with the routes that the settings ask for."""
    if not settings.control:
        return make_app(server)
    return make_app(server, Control(server, opening, settings.adapters, settings.most_adapters).routes())


def named(model: str) -> tuple[str, str]:
    """Split NAME=MODEL; a model without a name has its path as one."""
    name, equals, path = model.partition("=")
    if not equals or Path(model).exists():
        return model, model
    if not name or not path:
        raise InputError(f"{model}: write NAME=MODEL, or the model alone")
    return name, path


async def _serve(server: Server, app: Any, listener: socket.socket, drain_seconds: float) -> None:
    web = WebServer.of(app)
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        received.append(number)
        if len(received) > 1:
            web.force_exit = True
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    serving = asyncio.ensure_future(web.serve(sockets=[listener]))
    waiting = asyncio.ensure_future(stopping.wait())
    host, port = listener.getsockname()[:2]
    while not web.started and not serving.done():
        await asyncio.sleep(0.01)
    if not serving.done():
        where = f"[{host}]" if ":" in host else host
        echo(f"serving {', '.join(server.names())} on http://{where}:{port}", err=True)
    await asyncio.wait((serving, waiting), return_when=asyncio.FIRST_COMPLETED)
    if received:
        await _drain(server, received, drain_seconds)
    await close(web, serving)
    if not received:
        raise RunError("the server ended by itself")


async def _drain(server: Server, received: list[signal.Signals], seconds: float) -> None:
    """Let requests end that have begun, at most so long; refuse others."""
    server.draining = True
    count = server.requests
    loop = asyncio.get_running_loop()
    have = "has" if count == 1 else "have"
    echo(
        f"stopping ({received[0].name}): {counted(count, 'requests')} in flight {have} {seconds:g} s to end",
        err=True,
    )
    deadline = loop.time() + seconds
    while server.requests and len(received) < 2 and loop.time() < deadline:
        await asyncio.sleep(0.02)
    left = server.requests
    for call in list(server.calls):
        for pending in call.completions:
            pending.finish("abort")
    ended = f"stopped: {counted(max(count - left, 0), 'requests')} ended"
    if left:
        were = "was" if left == 1 else "were"
        ended += f", {left:,} {were} cut off"
    echo(ended, err=True)
