"""Read the tool calls in what a policy wrote, in the format of its chat template.

json    <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>, or a list of such objects
named   [TOOL_CALLS]f[ARGS]{"x": 1}
tags    <tool_call><function=f><parameter=x>1</parameter></function></tool_call>
python  <|tool_call_start|>[f(x=1)]<|tool_call_end|>
braces  <|tool_call>call:f{x:1,s:<|"|>a<|"|>}<tool_call|>
harmony <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rlhf_core.errors import InputError
from rlhf_core.tokenizer.calls import with_parsed_parameters
from rlhf_core.tokenizer.encoding import Ints
from rlhf_core.tokenizer.options import text_problem

if TYPE_CHECKING:
    from rlhf_core.environments.conversation import ConversationEncoder

PYTHON_TAG = "<|python_tag|>"
"""What Llama may write before calls."""
CONSTANTS = {"True": True, "False": False, "None": None}
START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
"""What gpt-oss writes before a message's role, its channel, and what it says."""
THOUGHT = "<|channel>", "<channel|>"
"""What Gemma 4 writes around a thought, which begins with the word "thought"."""
TEXT, NAME, ARGUMENTS = "qzxtext", "qzxname", {"qzxfirst": "qzxone", "qzxsecond": "qzxtwo"}
"""A call that a template is given to find its format, and the text before it."""


@dataclass(frozen=True)
class CallFormat:
    """How a template writes a tool call. White space in and around marks does not count, unless stated.

    opening, closing: marks around each call. name_end: mark between the name and the arguments (named) or after the
    name (tags). parameter: marks before a key, between it and its value, and after that, with the line ends that are
    no part of the value (tags); the mark around a text (braces). alone: whether the template leaves out a text next to
    calls, so that a reply is the one or the other.
    """

    way: Literal["json", "named", "tags", "python", "braces", "harmony"]
    opening: str = ""
    closing: str = ""
    name_end: str = ""
    parameter: tuple[str, str, str] = ("", "", "")
    alone: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks that the format writes, some of them empty."""
        return (self.opening, self.closing, self.name_end, *self.parameter)


FORMATS = (
    CallFormat("json", "<tool_call>", "</tool_call>"),  # Hermes, Qwen 2.5 and 3
    CallFormat(  # Qwen 3 Coder and 3.5, Nemotron 3
        "tags",
        "<tool_call>\n<function=",
        "</function>\n</tool_call>",
        ">",
        ("<parameter=", ">\n", "\n</parameter>"),
    ),
    CallFormat("named", "[TOOL_CALLS]", "", "[ARGS]"),  # Mistral
    CallFormat("json", "[TOOL_CALLS]"),  # Mistral, earlier
    CallFormat(  # GLM 4.5
        "tags",
        "<tool_call>",
        "</tool_call>",
        parameter=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"),
    ),
    CallFormat("json", "<|tool_call|>", "<|/tool_call|>"),  # Phi 4 mini
    CallFormat("json", "<|tool_call|>"),  # Granite
    CallFormat("python", "<|tool_call_start|>", "<|tool_call_end|>"),  # LFM 2
    CallFormat("braces", "<|tool_call> call:", "<tool_call|>", parameter=('<|"|>', "", "")),  # Gemma 4
    CallFormat("harmony", "to=functions.", "<|call|>", "<|message|>"),  # gpt-oss
    CallFormat("json", alone=True),  # Llama 3
)
"""The formats that are known, in the order in which a template's is looked for."""


class ParsedCall(NamedTuple):
    """A call at the characters `start` to `end` of a text; `error` says what is wrong with it."""

    start: int
    end: int
    name: Any = None
    arguments: Any = None
    id: Any = None
    error: str | None = None


class CallError(Exception):
    """What is wrong with a call, in words for the policy."""


class CallParser:
    """Turn what a policy sampled into the assistant's message."""

    def __init__(self, encoder: ConversationEncoder, tools: Sequence[Any] | None = None) -> None:
        """tools: JSON schemas of the tools, which say which values are texts in formats that do not quote them; without
        any, a reply is its text, except for a thought in a channel of its own (gpt-oss, Gemma 4).

        Raises InputError if there are tools, and the template writes calls in none of `FORMATS`.
        """
        self.encoder = encoder
        tools = with_parsed_parameters(tools or ())
        self._has_tools = bool(tools)
        self.format = call_format(encoder) if tools else None
        if not tools and _opened(encoder).endswith(f"{START}assistant"):
            self.format = next(form for form in FORMATS if form.way == "harmony")
        self._schemas = dict(map(_parameters, tools))
        added = getattr(encoder.tokenizer, "added_tokens_decoder", {}).values()
        special = sorted((token.content for token in added if token.special), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special)) or r"(?!)")
        marks = "" if self.format is None else "".join(self.format.marks) + PYTHON_TAG
        self._marks_are_special = self._special.search(marks + THOUGHT[0]) is not None
        self._thinks = _opened(encoder).rstrip().endswith("<think>")
        harmony = self.format is not None and self.format.way == "harmony"
        self.has_channels = harmony or THOUGHT[0] in encoder.tokenizer.get_added_vocab()
        """Whether a reply may have a thought in a channel of its own."""

    def message(self, ids: Ints | Sequence[int]) -> dict[str, Any]:
        """Parse sampled ids, int32 [n], a final stop token included, as `parse` does."""
        return self.parse(self._text(ids))

    def so_far(self, ids: Ints | Sequence[int]) -> tuple[str, str]:
        """Read ids of a reply that is not over: (its content, its thought), as far as nothing else may come of them."""
        text = self._text(ids).rstrip("\N{REPLACEMENT CHARACTER}")
        form, (opening, closing) = self.format, THOUGHT
        if form is not None and form.way == "harmony":
            if (
                self._has_tools or MESSAGE not in text
            ):  # until then it may be a call, or the header of a channel
                return "", ""
        elif form is not None:  # without a mark, the whole reply may be a call
            text = text.partition(form.opening.split()[0])[0] if form.opening else ""
        thought = text.rpartition(opening)[2]
        if closing not in thought and "thought\n".startswith(thought):
            text = text.removesuffix(opening + thought)
        found = self.parse(text)
        return found["content"], found.get("thinking") or found.get("reasoning_content") or ""

    def _text(self, ids: Ints | Sequence[int]) -> str:
        sampled = [int(i) for i in ids]
        if sampled and sampled[-1] in self.encoder.stop_ids:
            sampled.pop()
        decode = self.encoder.tokenizer.decode
        special = self._marks_are_special  # `parse` reads these, and drops the others
        text: str = decode(sampled, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        return text

    def parse(self, text: str) -> dict[str, Any]:
        """Parse a reply to a message: `role`, `content` without the calls, `tool_calls` and `call_errors` if any. A
        thought in a channel of its own is the message's `reasoning_content` (Gemma 4) or `thinking` (gpt-oss; left out
        where a call has a text next to it, since the template takes one of them).

        A call is {"type": "function", "function": {"name", "arguments"}}, with an "id" if the policy wrote one.
        `call_errors` says, for the policy, what is wrong with each malformed call. Calls inside a thought or a code
        block do not count. Never raises.
        """
        if self.format is not None and self.format.way == "harmony":
            message, calls = self._read_harmony(text)
        else:
            thoughts, text = _without_thoughts(text)
            calls = [] if self.format is None else self._read(self.format, text)
            message = {"role": "assistant", "content": self._content(text, calls)}
            if thoughts:
                message["reasoning_content"] = self._special.sub("", thoughts)
        made = [_as_message(call) for call in calls if call.error is None]
        if made:
            message["tool_calls"] = made
        errors = [call.error for call in calls if call.error is not None]
        if errors:
            message["call_errors"] = errors
        return message

    def _read_harmony(self, text: str) -> tuple[dict[str, Any], list[ParsedCall]]:
        calls = [_checked(call) for call in _harmony_calls(text)] if self._has_tools else []
        said: dict[str, list[str]] = {"thinking": [], "content": []}
        for header, body in _harmony_messages(text):
            channel = header.partition(CHANNEL)[2].split()[:1]
            if not (self._has_tools and _RECIPIENT.search(header)):
                said["thinking" if channel == ["analysis"] else "content"].append(body)
        if MESSAGE not in text:
            said["content"] = [text]
        words = {name: self._special.sub("", "\n".join(parts)) for name, parts in said.items()}
        thinking = words["thinking"] and not (calls and words["content"])
        message = {"role": "assistant", "content": words["content"]}
        return message | ({"thinking": words["thinking"]} if thinking else {}), calls

    def _thought_end(self, text: str) -> int:
        """Return where calls may begin: after the last thought, or at the end of a text that is all thought."""
        at = text.rfind("</think>")
        if at >= 0:
            return at + len("</think>")
        return len(text) if self._thinks or "<think>" in text else 0

    def _read(self, form: CallFormat, text: str) -> list[ParsedCall]:
        calls = [_checked(call) for call in _calls(form, text, self._thought_end(text), self._schemas)]
        if calls and form.alone and self._content(text, calls):
            error = "a call must be the whole reply: the text around it would be lost"
            return [ParsedCall(calls[0].start, calls[-1].end, error=error)]
        return calls

    def _content(self, text: str, calls: Sequence[ParsedCall]) -> str:
        content, at = "", 0
        for call in calls:
            content += text[at : call.start]
            at = max(at, call.end)
        content += text[at:]
        content = content.strip() if calls else content
        return self._special.sub("", content) if self._marks_are_special else content


def call_format(encoder: ConversationEncoder) -> CallFormat | None:
    """Return the known format that reads what the template writes of a call; None if it writes none.

    Some templates of LFM 2 leave calls to the policy: these have its format if the tokenizer has the mark of a call.
    Raises InputError if it writes calls in a format that is not known.
    """
    closed = _with_a_call(encoder)
    if not all(word in closed for word in (NAME, *ARGUMENTS.values())):
        known = encoder.tokenizer.get_added_vocab()
        return next((form for form in FORMATS if form.way == "python" and form.opening in known), None)
    written = _call_in(closed, encoder)
    for form in FORMATS:
        calls = [_checked(call) for call in _calls(form, written, 0, {})]
        if [(call.name, call.arguments, call.error) for call in calls] == [(NAME, ARGUMENTS, None)]:
            return replace(form, alone=TEXT not in closed)
    raise InputError(
        f"{encoder.name} writes tool calls in an unknown format, {written.strip()[:80]!r}: give a chat "
        "template that writes them as Qwen's, Mistral's or Llama's does"
    )


def _with_a_call(encoder: ConversationEncoder) -> str:
    """Write a conversation that ends with a call, after a text where the template takes both; "" if it takes none."""
    asked = {"role": "user", "content": "a"}
    call = {"type": "function", "function": {"name": NAME, "arguments": dict(ARGUMENTS)}}
    for content in (TEXT, ""):
        reply = {"role": "assistant", "content": content, "tool_calls": [call]}
        with suppress(InputError):
            closed = encoder.write(encoder.with_call_ids([asked, reply]))
            if closed:
                return closed
    return ""


def _call_in(closed: str, encoder: ConversationEncoder) -> str:
    """Cut the call out of a conversation of `_with_a_call`: without what is before it, and what stops the reply."""
    opened = _opened(encoder)
    shared = closed[: shared_length(opened, closed)]
    start = len(shared)
    if shared.rfind("<") > shared.rfind(">"):  # a mark stays whole
        start = shared.rfind("<")
    before, _, text = closed[start:].rpartition(TEXT)
    if NAME not in text:  # Gemma 4 writes a text after the calls
        text = before
    last = max(text.rfind(word) for word in (NAME, *ARGUMENTS.values()))
    end = len(text)
    for stop in encoder.stops.values():
        at = text.find(stop, last)
        if at >= 0:
            end = min(end, at)
    return text[:end]


def shared_length(a: Sequence[str], b: Sequence[str]) -> int:
    """Count the equal items, or characters, that two sequences begin with."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def _opened(encoder: ConversationEncoder) -> str:
    try:
        return encoder.write([{"role": "user", "content": "a"}], open_turn=True)
    except InputError:
        return ""


def _parameters(tool: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the name of a tool and the schemas of its parameters."""
    function = tool.get("function", tool)
    parameters = function.get("parameters") or {}
    return str(function.get("name")), parameters.get("properties") or {}


def _as_message(call: ParsedCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    identity = {} if call.id is None else {"id": str(call.id)}
    return {**identity, "type": "function", "function": function}


def _checked(call: ParsedCall) -> ParsedCall:
    """Check the parts of a call, and put its arguments into JSON's types."""
    if call.error is not None:
        words = " ".join(call.error.encode(errors="replace").decode().split())
        return call._replace(error=words[:300])
    name, arguments = call.name, call.arguments
    if not isinstance(name, str) or not name.strip():
        return call._replace(error='the call has no function "name"')
    try:
        if isinstance(arguments, str):
            arguments = _read_json(arguments)
        if not isinstance(arguments, Mapping | None):
            return call._replace(error="the call's arguments are not an object such as {}")
        written = json.dumps([name, arguments or {}, call.id], ensure_ascii=False, allow_nan=False)
    except CallError as error:
        return call._replace(error=f"the call's arguments are not JSON: {error}")
    except (TypeError, ValueError, RecursionError):
        return call._replace(error="the call's arguments cannot be written as JSON")
    problem = text_problem(written)
    if problem:
        return call._replace(error=f"the call {problem}".encode(errors="replace").decode())
    return call._replace(name=name.strip(), arguments=json.loads(written)[1])


# Find calls in a text.


def _calls(form: CallFormat, text: str, start: int, schemas: Mapping[str, Any]) -> Iterator[ParsedCall]:
    """Yield the calls of a format in `text` from `start` on, malformed ones too; none if no mark opens one."""
    if form.way == "harmony":
        yield from _harmony_calls(text[start:])
        return
    if not form.opening:
        yield from _unmarked(text, start)
        return
    opening, closing = _pattern(form.opening), _pattern(form.closing)
    fences = 0
    while match := opening.search(text, start):
        fences += len(_FENCE.findall(text, start, match.start()))
        fence = _FENCE.search(text, match.end()) if fences % 2 else None
        if fence is not None:  # it is shown in a code block
            start = fence.end()
            fences += 1
            continue
        try:
            calls, end = _READERS[form.way](form, text, match.end(), schemas)
            close = closing.match(text, _skip_blanks(text, end))
            if close is None:
                raise CallError(f"the call does not end with {form.closing}")
            end = close.end()
        except CallError as error:
            close = closing.search(text, match.end()) if form.closing else None
            following = opening.search(text, match.end())
            ends = [close.end() if close else len(text), following.start() if following else len(text)]
            end = min(ends)
            yield ParsedCall(match.start(), end, error=str(error))
        else:
            for name, arguments, identity in calls:
                yield ParsedCall(match.start(), end, name, arguments, identity)
        start = end


_FENCE = re.compile(r"^[ \t]*```", re.MULTILINE)
"""What begins or ends a code block."""


def _unmarked(text: str, start: int) -> Iterator[ParsedCall]:
    """Yield the calls of a text that is calls and nothing else."""
    body = text[start:].strip()
    tagged = body.startswith(PYTHON_TAG)
    body = body.removeprefix(PYTHON_TAG).strip()
    if start or not (tagged or re.match(r"[\[{]\s*(\{\s*)?\"(name|type|function)\"", body)):
        return
    calls, at = [], 0
    try:
        while at < len(body):
            value, at = _decode(body, at)
            calls += [_named_arguments(each) for each in (value if isinstance(value, list) else [value])]
            at = _skip_blanks(body, at)
            at += body.startswith(";", at)
            at = _skip_blanks(body, at)
    except CallError as error:
        yield ParsedCall(0, len(text), error=str(error))
        return
    if tagged or all(arguments is not None for _, arguments, _ in calls):
        for name, arguments, identity in calls:
            yield ParsedCall(0, len(text), name, arguments, identity)


def _pattern(mark: str) -> re.Pattern[str]:
    """Match a mark with any white space, or none, where it has some."""
    return re.compile(r"\s*".join(map(re.escape, mark.split())))


def _skip_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]*)")


def _harmony_messages(text: str) -> Iterator[tuple[str, str]]:
    """Yield (role, recipient and channel; what it says) of each of a reply's messages, the last perhaps cut."""
    for part in text.split(START):
        header, mark, body = part.partition(MESSAGE)
        if mark:
            yield header, re.split(r"<\|(?:end|call|return)\|>", body)[0]


def _harmony_calls(text: str) -> Iterator[ParsedCall]:
    for header, body in _harmony_messages(text):
        recipient = _RECIPIENT.search(header)
        if recipient:
            yield ParsedCall(0, len(text), recipient[1], body)


def _without_thoughts(text: str) -> tuple[str, str]:
    """Split a text into its thoughts between the marks of `THOUGHT`, without their first word, and the rest."""
    opening, closing = THOUGHT
    rest, *parts = text.split(opening)
    thoughts = []
    for part in parts:
        thought, _, after = part.partition(closing)
        thoughts.append(thought.removeprefix("thought").strip())
        rest += after
    return "\n".join(filter(None, thoughts)), rest


# Read what stands after the mark that opens a call: name, arguments and id of each call, and where they end.

_Read = tuple[list[tuple[Any, Any, Any]], int]


def _read_objects(form: CallFormat, text: str, at: int, schemas: Mapping[str, Any]) -> _Read:
    value, end = _decode(text, at)
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(each, Mapping) for each in values):
        raise CallError('the call is not an object such as {"name": …, "arguments": {…}}')
    return [_named_arguments(each) for each in values], end


def _named_arguments(value: Any) -> tuple[Any, Any, Any]:
    """Read the name, arguments and id of a call from its JSON object; None where it lacks one."""
    if not isinstance(value, Mapping):
        return None, None, None
    function = value.get("function")
    function = function if isinstance(function, Mapping) else value
    arguments = function.get("arguments", function.get("parameters"))
    return function.get("name", function.get("tool_name")), arguments, value.get("id")


def _read_named(form: CallFormat, text: str, at: int, schemas: Mapping[str, Any]) -> _Read:
    match = (
        _pattern(form.name_end).search(text, at) if form.name_end else re.compile(r"(?=\{)").search(text, at)
    )
    if match is None:
        raise CallError(f"the call has no {form.name_end or 'arguments'} after its name")
    arguments, end = _decode(text, match.end())
    return [(text[at : match.start()], arguments, None)], end


def _read_tags(form: CallFormat, text: str, at: int, schemas: Mapping[str, Any]) -> _Read:
    key_mark, value_mark, end_mark = map(_pattern, form.parameter)
    closing = _pattern(form.closing)
    name_end = _pattern(form.name_end) if form.name_end else re.compile(r"(?=[\s<])")
    after_name = name_end.search(text, at)
    if after_name is None:
        raise CallError(f"the call has no {form.name_end or 'parameters'} after its name")
    name = text[at : after_name.start()].strip()
    arguments = {}
    if not re.fullmatch(r"[\w.:/-]+", name):
        raise CallError("the call has no name of a function")
    value_end = re.compile(rf"{end_mark.pattern}(?=\s*(?:{key_mark.pattern}|{closing.pattern or '$'}))")
    at = _skip_blanks(text, after_name.end())
    while key := key_mark.match(text, at):
        to_value = value_mark.search(text, key.end())
        end = value_end.search(text, to_value.end()) if to_value else None
        if to_value is None or end is None:
            raise CallError(
                f"the parameter {text[key.end() : key.end() + 40]!r} does not end with {form.parameter[2].strip()}"
            )
        parameter = text[key.end() : to_value.start()].strip()
        value = _without_line_ends(text[to_value.end() : end.start()], form)
        arguments[parameter] = _read_value(value, schemas.get(name, {}).get(parameter))
        at = _skip_blanks(text, end.end())
    return [(name, arguments, None)], at


def _read_python(form: CallFormat, text: str, at: int, schemas: Mapping[str, Any]) -> _Read:
    """Read [f(x=1), g(y="a")], whose values are constants of Python or JSON."""
    end = text.find(form.closing, at)
    if end < 0:
        raise CallError(f"the call does not end with {form.closing}")
    try:
        with warnings.catch_warnings(action="ignore"):  # of unknown escapes
            tree = ast.parse(text[at:end].strip(), mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
        return [_read_python_call(call) for call in calls], end
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError) as error:
        raise CallError(f"the call is not written as [name(key=value)]: {error}") from None


def _read_python_call(node: ast.expr) -> tuple[Any, Any, Any]:
    if not isinstance(node, ast.Call):
        raise CallError("the call is not written as [name(key=value)]")
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise CallError("the call's arguments need their names, as in [name(key=value)]")
    values = {keyword.arg: ast.literal_eval(_Constants().visit(keyword.value)) for keyword in node.keywords}
    return ast.unparse(node.func), values, None


_BRACES = re.compile(r'<\|"\|>(.*?)<\|"\|>|([{}\[\],:])|([^{}\[\],:<]+)', re.DOTALL)


def _read_braces(form: CallFormat, text: str, at: int, schemas: Mapping[str, Any]) -> _Read:
    """Read f{x:1,s:<|"|>a<|"|>}, whose keys have no quotes: its parts are written as JSON, and that is read."""
    end = max(text.find("{", at), at)
    name = text[at:end].strip()
    written = ""
    depth = 0
    for part in _BRACES.finditer(text, end):
        if part.start() != end:
            break
        end, (quoted, mark, bare) = part.end(), part.groups()
        if mark:
            written += mark
            depth += (mark in "{[") - (mark in "}]")
        elif bare is None or text.startswith(":", end):
            written += json.dumps(quoted if bare is None else bare.strip())
        elif bare.strip():
            written += json.dumps(_read_value(bare, {}))
        if not depth:
            break
    try:
        if depth or not re.fullmatch(r"[\w.:/-]+", name):
            raise CallError
        return [(name, _read_json(written), None)], end
    except CallError:
        raise CallError("the call is not written as call:name{key:value}") from None


class _Constants(ast.NodeTransformer):
    """Replace JSON's names of constants by Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        names = {"true": True, "false": False, "null": None}
        return ast.Constant(names[node.id]) if node.id in names else node


def _without_line_ends(value: str, form: CallFormat) -> str:
    """Drop the line ends that the template writes around a value."""
    if form.parameter[1].endswith("\n"):
        value = value.removeprefix("\n")
    return value.removesuffix("\n") if form.parameter[2].startswith("\n") else value


def _read_value(value: str, schema: Any) -> Any:
    """Read a value that is written without quotes: a text if the schema says so, else JSON or a Python constant."""
    schema = schema if isinstance(schema, Mapping) else {}
    bare = value.strip()
    if schema.get("type") == "string":
        return None if schema.get("nullable") and bare in ("None", "null") else value
    if bare in CONSTANTS:
        return CONSTANTS[bare]
    try:
        return _read_json(bare)
    except CallError:
        return value


def _decode(text: str, at: int) -> tuple[Any, int]:
    """Decode the JSON value that begins at a place, and return where it ends."""
    at = _skip_blanks(text, at)
    try:
        return _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise CallError(
            f"the call is not JSON: {error.msg.removesuffix(' at')} at character {error.pos - at + 1} of it"
        ) from None
    except RecursionError:
        raise CallError("the call is not JSON: it is nested too deeply") from None
    except ValueError as error:
        raise CallError(f"the call is not JSON: {error}") from None


def _read_json(text: str) -> Any:
    value, end = _decode(text, 0)
    if text[end:].strip():
        raise CallError("something follows the value")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_READERS = {
    "json": _read_objects,
    "named": _read_named,
    "tags": _read_tags,
    "python": _read_python,
    "braces": _read_braces,
}
