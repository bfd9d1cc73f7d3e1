"""Functions that a policy may call, as an environment."""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from rlhf_core.contracts import Turn
from rlhf_core.errors import InputError, Stopped, code_location, said_by, suggest, warn
from rlhf_core.hidden import scrub
from rlhf_core.plugins.component import load_function
from rlhf_core.runtime.caches import cached
from rlhf_core.workers.event_loop import is_async

LONGEST = 300
"""Characters of what a tool raised that the policy gets."""
QUOTED_PATH = re.compile(r"""(?<=['"])(?:[A-Za-z]:)?[/\\][^'"\n]*[/\\]([^'"/\\\n]+)(?=['"])""")
PATH = re.compile(r"(?<![\w/:.])(?:[A-Za-z]:)?(?:[/\\][^\s/\\'\":;,()<>]+)+[/\\]([^\s/\\'\":;,()<>]+)")
"""Paths from the root, with the file's name: in quotes, where they may hold blanks, and without."""


@dataclass(frozen=True)
class Tool:
    """A function that a policy may call. schema: its JSON schema. types: {parameter: the type of its values}."""

    name: str
    function: Callable[..., Any]
    schema: Mapping[str, Any]
    types: Mapping[str, TypeAdapter[Any]]
    required: frozenset[str]

    def read(self, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Check arguments in JSON's types; return them in the function's, and what is wrong with them.

        No value is converted to fit, save what JSON has no type for: a list to a tuple or set, a number to a float.
        """
        values, problems = {}, []
        for name, value in arguments.items():
            if name not in self.types:
                known = f"its parameters are {', '.join(self.types)}" if self.types else "it has none"
                problems.append(
                    f"it has no parameter '{name}'; {known}.{suggest(name, self.types)}".rstrip(".")
                )
                continue
            try:
                values[name] = self.types[name].validate_json(json.dumps(value), strict=True)
            except ValidationError as error:
                problems.append(_words(name, error))
                continue
            choices = self.schema["function"]["parameters"]["properties"][name].get("enum")
            if choices is not None and value not in choices:
                problems.append(f"'{name}' is not one of {json.dumps(choices, ensure_ascii=False)}")
        problems += [f"it needs '{name}'" for name in sorted(self.required - set(arguments))]
        return values, problems


def _words(name: str, error: ValidationError) -> str:
    """Say which part of an argument does not fit its type, and what would: 'name.1.key': …"""
    details = error.errors(include_url=False, include_context=False)[:3]
    place = ".".join(map(str, (name, *details[0]["loc"]) if len(details) == 1 else (name,)))
    return f"'{place}': " + " or ".join(dict.fromkeys(detail["msg"] for detail in details))


class ToolEnvironment:
    """A world in which the policy calls functions, and the episode ends with its first reply without calls."""

    def __init__(self, tools: Sequence[str | Callable[..., Any]]) -> None:
        """tools: functions, or names such as "calc.py:add" and "package.module:function".

        Their annotations and Google-style docstrings become the JSON schemas in the attribute `tools`. Async functions
        run while other episodes continue; plain ones run one at a time. Raises InputError for one that has no schema.
        """
        self._tools = open_tools(tools)
        self.tools = [tool.schema for tool in self._tools.values()]
        self.asynchronous = any(is_async(tool.function) for tool in self._tools.values())

    def reset(self, row: Mapping[str, Any], seed: int) -> list[Mapping[str, Any]]:
        """Return the row's `prompt`: messages, or a text as the user's message. Raises InputError without one."""
        prompt = row.get("prompt")
        if prompt is None or not len(prompt):
            raise InputError(f"the row has no 'prompt' (it has {', '.join(map(str, row)) or 'nothing'})")
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)

    def step(self, completion: Mapping[str, Any]) -> Turn | Awaitable[Turn]:
        """Run the calls of a reply in their order, and answer each with a message; awaitable if a tool is async.

        What is wrong with a call, its arguments or its run is the message's content, in one line that begins with
        "Error: ". Metrics: `calls`, and `call_errors` among them.
        """
        turn = self._step(completion)
        return turn if self.asynchronous else _run_at_once(turn)

    async def _step(self, completion: Mapping[str, Any]) -> Turn:
        answers = [await self._answer(call) for call in completion.get("tool_calls") or ()]
        answers += [_Answer.failed("call", text) for text in completion.get("call_errors") or ()]
        return Turn(
            [answer.message for answer in answers],
            done=not answers,
            metrics={
                "calls": float(len(answers)),
                "call_errors": float(sum(answer.wrong for answer in answers)),
            },
        )

    async def _answer(self, call: Mapping[str, Any]) -> _Answer:
        name = str(call["function"]["name"])
        answer = await self._run(name, call["function"]["arguments"])
        if "id" in call:
            answer.message["tool_call_id"] = call["id"]
        return answer

    async def _run(self, name: str, arguments: Any) -> _Answer:
        tool = self._tools.get(name)
        if tool is None:
            known = ", ".join(self._tools)
            hint = suggest(name, self._tools)
            return _Answer.failed(name, f"there is no tool '{name}'.{hint} The tools are {known}")
        if not isinstance(arguments, Mapping):
            return _Answer.failed(name, f"the arguments of {name} are not an object such as {{}}")
        values, problems = tool.read(arguments)
        if problems:
            return _Answer.failed(name, f"{name} cannot be called: {'; '.join(problems)}")
        try:
            result = tool.function(**values)
            if inspect.isawaitable(result):
                result = await result
            return _Answer({"role": "tool", "name": name, "content": _as_text(result)})
        except Stopped:
            raise
        except (Exception, SystemExit) as error:
            warn(
                f"tool '{name}' raised {type(error).__name__}{code_location(error, __file__)}; the policy is "
                "shown this error, and episodes/call_errors counts it"
            )
            return _Answer.failed(
                name, f"{name} raised {type(error).__name__}: {said_by(error)}".rstrip(": ")
            )


def _run_at_once(work: Coroutine[Any, Any, Turn]) -> Turn:
    """Run a coroutine that waits for nothing. Raises TypeError if a tool that is not async returned an awaitable."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    work.close()
    raise TypeError("a tool that is not async returned an awaitable; write async def")


class _Answer(NamedTuple):
    """A message for the policy, and whether it says what is wrong with a call."""

    message: dict[str, Any]
    wrong: bool = False

    @classmethod
    def failed(cls, name: str, text: str) -> _Answer:
        """Make one short line of what went wrong, without the machine's directories."""
        line = " ".join(PATH.sub(r"\1", QUOTED_PATH.sub(r"\1", scrub(text))).split())
        line = line if len(line) <= LONGEST else line[:LONGEST] + " …"
        return cls({"role": "tool", "name": _valid(name), "content": _valid(f"Error: {line}")}, True)


def _as_text(result: Any) -> str:
    """Write what a tool returned: a text as it is, anything else as JSON, or as Python prints it."""
    if isinstance(result, str):
        return _valid(result)
    try:
        return _valid(json.dumps(result, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError):
        return _valid(str(result))


def _valid(text: str) -> str:
    """Replace halves of surrogate pairs, which no tokenizer takes."""
    return text.encode(errors="replace").decode()


# Make tools of functions.


def open_tools(tools: Sequence[str | Callable[..., Any]]) -> dict[str, Tool]:
    """Load functions, and make tools of them, by name. Raises InputError with all that is wrong with them."""
    opened: dict[str, Tool] = {}
    problems: list[str] = []
    for item in tools:
        try:
            written = item if isinstance(item, str) else ""
            tool = make_tool(load_function(item) if isinstance(item, str) else item, written)
        except InputError as error:
            problems += error.problems
            continue
        if tool.name in opened:
            problems.append(f"two tools are named '{tool.name}': rename one of the functions")
        opened[tool.name] = tool
    if not tools:
        problems.append('tools is empty: name functions, such as ["calc.py:add"]')
    if problems:
        raise InputError(*problems)
    return opened


@cached
def make_tool(function: Callable[..., Any], written: str = "") -> Tool:
    """Make a tool of a function with annotations and a Google-style docstring.

    written: the function as the user named it. Raises InputError, with what to write, where the function says too
    little for a schema.
    """
    from transformers.utils import get_json_schema

    name = getattr(function, "__name__", "")
    what = f"tool '{written or name or repr(function)}'"
    if not inspect.isroutine(function) or not name.isidentifier():
        raise InputError(
            f"{what} is not a function with a name: write one, def {name or 'name'}(…), that calls it"
        )
    parameters = inspect.signature(function).parameters.values()
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise InputError(f"{what}: parameter '{parameter.name}' cannot be passed by name: remove * and /")
    try:
        schema = get_json_schema(function)
        hints = typing.get_type_hints(function, include_extras=True)
        types = {parameter.name: TypeAdapter(hints[parameter.name]) for parameter in parameters}
    except Exception as error:  # annotations are code
        said = scrub(said_by(error)).strip().partition("\n")[0].partition(". ")[0].rstrip(".!: ")
        raise InputError(
            f"{what} has no JSON schema: {said or type(error).__name__}. Give it a docstring with a first sentence and "
            "an Args: section, and every parameter a type such as str, int, float, bool, list, dict or Literal"
        ) from error
    required = {parameter.name for parameter in parameters if parameter.default is parameter.empty}
    return Tool(name, function, schema, types, frozenset(required))
