"""Find the format in which a chat template writes tool calls, by rendering a known call.

So a template never seen before works if it writes calls in one of these ways, between whatever marks:

    object  <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>
    list    [TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]
    named   [TOOL_CALLS]f[ARGS]{"x": 1}
    tags    <tool_call><function=f><parameter=x>1</parameter></function></tool_call>
    python  <|tool_call_start|>[f(x=1)]<|tool_call_end|>
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from rlhf_core.errors import InputError

if TYPE_CHECKING:
    from rlhf_core.environments.conversation import ConversationEncoder

Way: TypeAlias = Literal["object", "list", "named", "tags", "python"]
TEXT, NAME, ARGUMENTS = "qzxtext", "qzxname", {"qzxfirst": "qzxone", "qzxsecond": "qzxtwo"}
"""The known call, and the text before it."""
UNIT = re.compile(r"<[^<>\s][^<>]*>?|\[/?[A-Z_]+\]|\s+|[^<>\s\[]+>?|.", re.DOTALL)
"""White space, marks and words: the marks of a format begin and end between them."""


@dataclass(frozen=True)
class CallFormat:
    """How a template writes a tool call. White space in and around marks does not count, unless stated.

    opening, closing: marks around each call. name_end: mark
    between the name and the arguments (named) or after the name (tags). parameter: marks before a key, between it and
    its value, and after that, with the line ends that are no part of the value (tags). around: marks around all calls
    of a reply together. alone: whether the template leaves out a text beside calls, so that a reply is the one or the
    other.
    """

    way: Way
    opening: str = ""
    closing: str = ""
    name_end: str = ""
    parameter: tuple[str, str, str] = ("", "", "")
    around: tuple[str, str] = ("", "")
    alone: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks that the format writes, some of them empty."""
        return (self.opening, self.closing, self.name_end, *self.parameter, *self.around)


FORMATS = (
    CallFormat("object", "<tool_call>", "</tool_call>"),
    CallFormat(
        "tags",
        "<tool_call><function=",
        "</function></tool_call>",
        ">",
        ("<parameter=", ">\n", "\n</parameter>"),
    ),
    CallFormat("named", "[TOOL_CALLS]", "", "[ARGS]"),
    CallFormat("list", "[TOOL_CALLS]"),
    CallFormat("python", "<|tool_call_start|>", "<|tool_call_end|>"),
    CallFormat(
        "named",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "```<｜tool▁call▁end｜>",
        "```json",
        around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    CallFormat("object", alone=True),
)
"""Formats to try, in this order, where the template writes no calls."""


def call_format(encoder: ConversationEncoder) -> CallFormat | None:
    """Find the format in which the template writes tool calls; None if it writes none, or in no known way."""
    written = _written_calls(encoder, 1)
    one = written.rpartition(TEXT)[2]
    way, bodies = _bodies(one)
    if way is None:
        return None
    (start, end), between = bodies[0], None
    two = _written_calls(encoder, 2).rpartition(TEXT)[2]
    if way not in ("list", "python") and len(pair := _bodies(two)[1]) == 2:
        between = two[pair[0][1] : pair[1][0]]
    opening, closing, around = _split_marks(one[:start], one[end:], between)
    learned = CallFormat(way, opening, closing, around=around, alone=TEXT not in written)
    if way == "named":
        return replace(learned, name_end=one[start + len(NAME) : one.index("{", start)].strip())
    return _with_tags(learned, one[start:end]) if way == "tags" else learned


def _written_calls(encoder: ConversationEncoder, count: int) -> str:
    """Render a reply with a text that makes the known call, without the token that ends it; empty if that fails."""
    calls = [{"type": "function", "function": {"name": NAME, "arguments": dict(ARGUMENTS)}}] * count
    asked = {"role": "user", "content": "a"}
    try:
        messages = encoder.completed([asked, {"role": "assistant", "content": TEXT, "tool_calls": calls}])
        opened, closed = encoder.write([asked], open_turn=True), encoder.write(messages)
    except InputError:
        return ""
    shared = closed[: shared_length(opened, closed)]
    start = shared.rfind("<") if shared.rfind("<") > shared.rfind(">") else len(shared)  # marks stay whole
    text = closed[start:]
    last = max(text.rfind(word) for word in (NAME, *ARGUMENTS.values()))
    stops = [at for stop in encoder.stops.values() if (at := text.find(stop, max(last, 0))) >= 0]
    return text[: min(stops)] if stops else text


def _bodies(text: str) -> tuple[Way | None, list[tuple[int, int]]]:
    """Find how known calls are written, and where the variable part of each begins and ends."""
    values = list(_json_values(text))
    if bodies := [(a, b) for a, b, value in values if _is_call(value)]:
        return "object", bodies
    for a, b, value in values:
        if isinstance(value, list) and value and all(map(_is_call, value)):
            return "list", [(a, b)]
    if bodies := [
        (text.rindex(NAME, 0, a), b) for a, b, value in values if value == ARGUMENTS and NAME in text[:a]
    ]:
        return "named", bodies
    words = [re.escape(word) for item in ARGUMENTS.items() for word in item]
    if match := re.search(rf"\[?{NAME}\({words[0]}=.{words[1]}., ?{words[2]}=.{words[3]}.\)\]?", text):
        return "python", [match.span()]
    pattern = re.compile(".*?".join([NAME, *words]), re.DOTALL)
    bodies = [match.span() for match in pattern.finditer(text)]
    return ("tags", bodies) if bodies else (None, [])


def _json_values(text: str) -> Iterator[tuple[int, int, Any]]:
    """Yield the start, end and value of every object and list in a text, outermost first."""
    end = 0
    for start in (match.start() for match in re.finditer(r"[\[{]", text)):
        if start < end:
            continue
        try:
            value, end = json.JSONDecoder().raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        yield start, end, value


def read_call(value: Any) -> tuple[Any, Any, Any]:
    """Read the name, arguments and id of a call from its JSON object; None where it lacks one."""
    if not isinstance(value, Mapping):
        return None, None, None
    function = value.get("function")
    function = function if isinstance(function, Mapping) else value
    arguments = function.get("arguments", function.get("parameters"))
    return function.get("name", function.get("tool_name")), arguments, value.get("id")


def _is_call(value: Any) -> bool:
    name, arguments, _ = read_call(value)
    return name == NAME and arguments in (ARGUMENTS, json.dumps(ARGUMENTS))


def _split_marks(before: str, after: str, between: str | None) -> tuple[str, str, tuple[str, str]]:
    """Split what is written before and after one call into each call's marks, and those around all calls.

    between: what is written between two calls; None: not known.
    """
    opening, closing = UNIT.findall(before), UNIT.findall(after)
    opens, closes = len(opening), len(closing)
    if between is not None:
        units = UNIT.findall(between)
        opens, closes = shared_length(opening[::-1], units[::-1]), shared_length(closing, units)
    first = len(opening) - opens
    return (
        "".join(opening[first:]).strip(),
        "".join(closing[:closes]).strip(),
        ("".join(opening[:first]).strip(), "".join(closing[closes:]).strip()),
    )


def shared_length(a: Sequence[str], b: Sequence[str]) -> int:
    """Count the equal items, or characters, that two sequences begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _with_tags(learned: CallFormat, body: str) -> CallFormat | None:
    """Find the marks around names, keys and values in a call that is written with tags."""
    words = [NAME, *(word for item in ARGUMENTS.items() for word in item)]
    match = re.fullmatch("(.*?)".join(words), body, re.DOTALL)
    if match is None:
        return None
    first, second = UNIT.findall(match[1]), UNIT.findall(match[3])
    shared = shared_length(first[::-1], second[::-1])
    value_end = "".join(second[: len(second) - shared])
    if not shared or not value_end.strip():
        return None
    return replace(
        learned,
        closing=learned.closing.removeprefix(value_end.strip()).strip(),
        name_end="".join(first[: len(first) - shared]).strip(),
        parameter=("".join(first[len(first) - shared :]), match[2], value_end),
    )
