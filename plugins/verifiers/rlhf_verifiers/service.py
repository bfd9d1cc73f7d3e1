"""A taskset of verifiers whose agent is this process: its model calls wait until the trainer's policy answers them."""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import threading
from collections.abc import Coroutine
from typing import Any

from aiohttp import web
from rlhf_http.answers import chat_completion, error_body, finish_reason, usage
from verifiers.v1 import (
    EvalClientConfig,
    ModelContext,
    SingleAgentEnv,
    SingleAgentEnvConfig,
    SubprocessConfig,
    Trace,
)
from verifiers.v1.utils.loaders import environment_class

from rlhf_core import InputError

SESSION = "X-Session-ID"
"""The header in which verifiers sends the number of an episode with each of its model calls."""
CLOSING_SECONDS = 5.0


class OpenEpisode:
    """An episode under way: its requests come one at a time, and each waits for a reply."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.reply: asyncio.Future[dict[str, Any]] | None = None
        self.task: asyncio.Task[Any] | None = None
        self.trace: Trace | None = None

    async def asked(self, body: dict[str, Any]) -> dict[str, Any]:
        """Hand a request to whoever waits for it; return the policy's message."""
        self.reply = asyncio.get_running_loop().create_future()
        self.events.put_nowait(body)
        return await self.reply

    async def next(self, message: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """Answer the last request, then wait for the next one; None where the episode has ended."""
        if message is not None:
            assert self.reply is not None
            self.reply.set_result(message)
        return await self.events.get()


class TasksetService:
    """Holds verifiers' environment open, in a thread with an event loop of its own.

    taskset: its name, as verifiers knows it; options: fields of its config.
    Raises InputError where verifiers finds no such taskset, or it needs several agents.
    """

    def __init__(self, taskset: str, options: dict[str, Any], turns: int | None) -> None:
        try:
            agent = {"harness": {"id": "rlhf_verifiers"}, "runtime": SubprocessConfig(), "max_turns": turns}
            config = SingleAgentEnvConfig(taskset={**options, "id": taskset}, agent=agent)
            own = environment_class(taskset)
        except (ImportError, ValueError, TypeError, AttributeError) as error:
            raise InputError(f"taskset '{taskset}': {error}") from error
        if own is not SingleAgentEnv:
            raise InputError(
                f"taskset '{taskset}' brings the environment {own.__name__}, with agents of its own"
            )
        self.env = SingleAgentEnv(config)
        self.tasks = list(self.env.taskset)
        self.episodes: dict[str, OpenEpisode] = {}
        self.tools: list[dict[str, Any]] | None = None
        self.loop = asyncio.new_event_loop()
        self.serving: asyncio.Task[None]
        self.address = ""
        self.failure: Exception | None = None
        ready = threading.Event()
        self.thread = threading.Thread(
            target=self._run, args=(ready,), name=f"verifiers {taskset}", daemon=True
        )
        self.thread.start()
        ready.wait()
        atexit.register(self.close)
        if self.failure is not None:
            raise InputError(f"taskset '{taskset}': {self.failure}") from self.failure

    def close(self) -> None:
        """End what is under way, so that verifiers removes its directories and servers."""
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.serving.cancel)
            self.thread.join(CLOSING_SECONDS)

    def _run(self, ready: threading.Event) -> None:
        self.serving = self.loop.create_task(self._serve(ready))
        try:
            self.loop.run_until_complete(self.serving)
        except asyncio.CancelledError:
            under_way = asyncio.all_tasks(self.loop)
            for task in under_way:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*under_way, return_exceptions=True))
        except Exception as error:
            self.failure = error
        finally:
            ready.set()

    async def _serve(self, ready: threading.Event) -> None:
        """Keep verifiers' servers and ours until the process ends."""
        application = web.Application(client_max_size=2**30)
        application.router.add_post("/chat/completions", self._completion)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with self.env.serving():
            ready.set()
            await asyncio.Event().wait()

    async def _completion(self, request: web.Request) -> web.Response:
        """Answer a model call with the policy's message."""
        episode = self.episodes.get(request.headers.get(SESSION, ""))
        if episode is None:
            return web.json_response(error_body("no such episode", 404, "NotFoundError"), status=404)
        message = await episode.asked(await request.json())
        choice = {"index": 0, "message": message, "finish_reason": finish_reason("stop", message)}
        return web.json_response(chat_completion("0", 0, "policy", [choice], usage(0, 0)))

    async def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Await work of the service's loop from another one."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    async def begin(self, index: int) -> OpenEpisode:
        """Start an episode of a task."""
        episode = OpenEpisode()
        context = ModelContext("policy", EvalClientConfig(base_url=self.address, api_key_var="RLHF_NO_KEY"))

        def minted(trace: Trace) -> None:
            episode.trace = trace
            self.episodes[trace.id] = episode

        async def play() -> Any:
            try:
                (slot,) = self.env.slots(self.tasks[index])
                return await self.env.run_slot(slot, context, on_trace=minted)
            finally:
                if episode.trace is not None:
                    self.episodes.pop(episode.trace.id, None)
                episode.events.put_nowait(None)

        episode.task = asyncio.create_task(play())
        return episode

    def abandon(self, episode: OpenEpisode) -> None:
        """End an episode that nobody continues."""
        if episode.task is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(episode.task.cancel)


@functools.cache
def open_service(taskset: str, options: str, turns: int | None) -> TasksetService:
    """Return the service of a taskset; `options` is its config as JSON."""
    return TasksetService(taskset, json.loads(options), turns)
