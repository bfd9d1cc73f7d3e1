"""The environment `verifiers`, and the dataset of the same name, whose rows are its tasks."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core import InputError, Turn
from rlhf_verifiers.service import OpenEpisode, TasksetService, open_service

KEPT = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")


class Verifiers:
    """Play tasks of a taskset of verifiers; a row's `task` is the task's number.

    taskset: the taskset's name; config: fields of its config; turns: verifiers ends an episode after so many turns and
    scores it. Without it, an episode that `max_turns` ends has no reward.
    """

    asynchronous = True
    deterministic = False

    def __init__(
        self, taskset: str, config: Mapping[str, Any] | None = None, turns: int | None = None
    ) -> None:
        self.service = open_service(taskset, json.dumps(dict(config or {}), sort_keys=True), turns)
        self.taskset = taskset
        self.episode: OpenEpisode | None = None
        self.messages: list[dict[str, Any]] = []

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The schemas of the taskset's tools: those that its first task offers."""
        return first_tools(self.service)

    async def reset(self, row: Mapping[str, Any], seed: int) -> list[dict[str, Any]]:
        """Begin the task's episode; return what its agent would send to a model."""
        index = int(row["task"])
        if not 0 <= index < len(self.service.tasks):
            raise InputError(f"task {index}: taskset '{self.taskset}' has {len(self.service.tasks)}")
        self.episode = await self.service.call(self.service.begin(index))
        weakref.finalize(self, self.service.abandon, self.episode)
        body = await self.service.call(self.episode.next())
        if body is None:
            raise RuntimeError(failure(self.episode))
        self.messages = kept(body["messages"])
        return self.messages

    async def step(self, completion: Mapping[str, Any]) -> Turn:
        """Give the agent its model's message; return what it adds to the conversation, or the episode's rewards."""
        assert self.episode is not None
        message = {"role": "assistant", "content": completion.get("content") or ""}
        calls = completion.get("tool_calls")
        if calls:
            message["tool_calls"] = [
                wire(call, number) for number, call in enumerate(calls, len(self.messages))
            ]
        body = await self.service.call(self.episode.next(message))
        if body is None:
            return ended(self.episode)
        said = kept(body["messages"])
        before = len(self.messages) + 1
        if [each["role"] for each in said[:before]] != [
            *(each["role"] for each in self.messages),
            "assistant",
        ]:
            raise RuntimeError("its agent rewrote the conversation instead of continuing it")
        self.messages, added = said, said[before:]
        return Turn(messages=added)


class Tasks(Sequence[Mapping[str, Any]]):
    """The tasks of a taskset as rows: `prompt`, `task`, its number, and `name` where it has one.

    first, count: which of them, in the taskset's order; default: all.
    """

    def __init__(
        self, taskset: str, config: Mapping[str, Any] | None = None, first: int = 0, count: int | None = None
    ) -> None:
        tasks = open_service(taskset, json.dumps(dict(config or {}), sort_keys=True), None).tasks
        self.rows = [
            {"prompt": task.data.prompt_text or "(the environment speaks first)", "task": index}
            | ({"name": task.data.name} if task.data.name else {})
            for index, task in enumerate(tasks)
        ][first : None if count is None else first + count]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]


def kept(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with the fields that chat templates know."""
    return [{key: each[key] for key in KEPT if each.get(key) is not None} for each in messages]


def wire(call: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Write a parsed call as OpenAI's API has it."""
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    identity = call.get("id") or f"call_{number}"
    return {"id": identity, "type": "function", "function": {"name": function["name"], "arguments": text}}


def ended(episode: OpenEpisode) -> Turn:
    """Return the last turn: the sum of the rewards, each and every metric under its name."""
    trace = episode.trace
    if trace is None or not trace.ok:
        raise RuntimeError(failure(episode))
    rewards = {name: float(each.value) for name, each in trace.rewards.items() if each is not None}
    metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
    return Turn(reward=sum(rewards.values()) if rewards else None, done=True, metrics={**metrics, **rewards})


def failure(episode: OpenEpisode) -> str:
    """Say why verifiers gave an episode up."""
    errors = [] if episode.trace is None else list(episode.trace.errors)
    if episode.task is not None and episode.task.done() and not episode.task.cancelled():
        raised = episode.task.exception()
        if raised is not None:
            return f"verifiers: {raised}"
        errors += episode.task.result().errors
    return "verifiers: " + (
        "; ".join(f"{each.type}: {each.message}" for each in errors) or "the episode ended"
    )


def first_tools(service: TasksetService) -> list[dict[str, Any]]:
    """Begin an episode of the first task and read which tools its agent offers to the model."""

    async def look() -> list[dict[str, Any]]:
        episode = await service.begin(0)
        body = await episode.next()
        if body is None:
            raise InputError(failure(episode))
        assert episode.task is not None
        episode.task.cancel()
        return body.get("tools") or []

    if service.tools is None:
        service.tools = asyncio.run_coroutine_threadsafe(look(), service.loop).result()
    return service.tools
