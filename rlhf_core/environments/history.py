"""Find out whether a chat template keeps its past, by rendering conversations that grow."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import combinations_with_replacement, product
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_core.environments.call_formats import CallFormat, call_format
from rlhf_core.errors import InputError
from rlhf_core.tokenizer.encoding import Message

if TYPE_CHECKING:
    from rlhf_core.environments.conversation import ConversationEncoder

REMEDY = 'Set environment.history = "encoded_again", or give a chat template that keeps its past'
LONG = 10, 4000
"""Turns and characters per message of a long conversation, in which a template may cut what is old."""
TOOL = {
    "type": "function",
    "function": {
        "name": "qzxtool",
        "description": "qzxabout",
        "parameters": {
            "type": "object",
            "properties": {"qzxparameter": {"type": "string", "description": "qzxmeaning"}},
            "required": ["qzxparameter"],
        },
    },
}


class Form(NamedTuple):
    """What a reply holds. field: whether its thought stands in `reasoning_content` rather than in the text."""

    text: bool = True
    thought: bool = False
    field: bool = False
    call: bool = False


SPOKEN = (Form(), Form(thought=True), Form(thought=True, field=True))
CALLING = (
    Form(text=False, call=True),
    Form(call=True),
    Form(text=False, thought=True, call=True),
    Form(thought=True, call=True),
    Form(thought=True, field=True, call=True),
)


def template_problem(encoder: ConversationEncoder, role: str, tools: Sequence[Any] | None) -> str | None:
    """Describe what the template refuses or leaves out of a conversation in which messages of `role` follow replies.

    tools: JSON schemas, which it must write, as it must the calls. Return None if nothing is missing.
    """
    probe = [*tools, TOOL] if tools else None
    if probe and (problem := _schema_problem(encoder, probe)):
        return problem
    trial = _Trial(encoder, role, probe)
    forms = (Form(text=False, call=True),) if tools else (Form(), Form(call=True))
    refusals = []
    for form in forms:
        messages = [_user(0), _reply(form, 1), *trial.added(1, 1)]
        try:
            text = trial.written(messages, open_turn=True)
        except InputError as error:
            refusals.append(str(error))
            continue
        if tools and "qzxvalue1" not in trial.written(messages[:2]):
            return (
                f"{encoder.name} leaves out the tool calls of replies. Give a chat template that writes them"
            )
        if "qzxadded1" not in text:
            return f"{encoder.name} leaves out '{role}' messages. Give a chat template that writes them"
        return None
    what = "tool calls, or " if tools else ""
    return f"{encoder.name} refuses {what}'{role}' messages after a reply: {refusals[0]}"


def _schema_problem(encoder: ConversationEncoder, tools: Sequence[Any]) -> str | None:
    try:
        text = encoder.write([{"role": "user", "content": "qzxasked"}], tools, open_turn=True)
    except InputError as error:
        return f"{encoder.name} refuses tools: {error}"
    words = {"name": "qzxtool", "description": "qzxabout", "parameters": "qzxparameter"}
    if missing := [what for what, word in words.items() if word not in text]:
        return (
            f"{encoder.name} leaves out the schemas of tools (their {', '.join(missing)}): the policy would not know "
            "what it may call. Give a chat template that writes them"
        )
    return None


def history_problem(encoder: ConversationEncoder, role: str, tools: Sequence[Any] | None) -> str | None:
    """Describe what the template does to its past when messages of `role` follow replies, or return None."""
    try:
        return _Trial(encoder, role, [*tools, TOOL] if tools else None).problem()
    except InputError as error:
        words = str(error)
        return words if encoder.name in words else f"{encoder.name} fails on '{role}' messages: {words}"


class _Trial:
    """Conversations of one template in which messages of one role follow the replies."""

    def __init__(self, encoder: ConversationEncoder, role: str, tools: Sequence[Any] | None) -> None:
        self.encoder, self.role, self.tools = encoder, role, tools

    def problem(self) -> str | None:
        """Describe the first thing that the template does to its past, or return None."""
        differences: list[str] = []
        forms: list[Form] = []
        for form in (*SPOKEN, *CALLING) if self.tools or self.role == "tool" else SPOKEN:
            try:
                difference = self._difference_at_once(form)
            except InputError:
                continue  # what the template refuses is no part of a conversation
            if difference:
                differences.append(difference)
            elif self._may_be_written(form):
                forms.append(form)
        if not forms:
            return (
                differences[0]
                if differences
                else f"{self.encoder.name} leaves out what replies say. {REMEDY}"
            )
        growths = (self._growth_problem(*conversation) for conversation in self._conversations(forms))
        return next((problem for problem in growths if problem), None)

    def _difference_at_once(self, form: Form) -> str | None:
        """Describe how the template begins a reply otherwise than its own generation prompt; None if it does not.

        A policy cannot write a reply of such a form, if another form continues the prompt.
        """
        messages = [_user(0), _reply(form, 1), *self.added(1, 1)]
        opened = self.encoder.write(messages[:1], self.tools, open_turn=True)
        later = self.written(messages, open_turn=True)
        if later.startswith(opened) or self.written(messages[:2]).startswith(opened):
            return None
        return self.encoder.rewrites(opened, later)

    def _may_be_written(self, form: Form) -> bool:
        """Whether the template has a place for what sets a form apart, so that a policy may write it.

        Calls that the template writes without the text beside them are no calls to `CallParser`.
        """
        closed = self.written([_user(0), _reply(form, 1)])
        if form.field and "qzxthought1" not in closed:
            return False
        if not form.call:
            return True
        beside = form.text or form.thought
        return "qzxvalue1" in closed and not (beside and self._format is not None and self._format.alone)

    def _conversations(self, forms: Sequence[Form]) -> Iterator[tuple[bool, Sequence[Form], int, int]]:
        """Yield conversations: whether one begins with a system message, the forms of its replies, how many messages
        follow each, and how long each is.
        """
        last = next((form for form in forms if not form.call), forms[0])
        several = [1, 2] if self._accepts([_user(0), _reply(forms[-1], 1), *self.added(1, 2)]) else [1]
        systems = [False, True] if self._accepts([_system(), _user(0)]) else [False]
        for a, b in combinations_with_replacement(forms, 2):
            yield False, (a, b, a, last), 1, 0
        for system, added, a in product(systems, several, forms):
            yield system, (a, last, a, a), added, 0
        yield False, [forms[-1]] * LONG[0], 1, LONG[1]

    def _growth_problem(self, system: bool, replies: Sequence[Form], added: int, length: int) -> str | None:
        """Render a conversation turn by turn, and describe the first change of what was written before."""
        name = self.encoder.name
        messages = [*([_system()] if system else []), _user(0, length)]
        opened = self.written(messages, open_turn=True)
        for number, form in enumerate(replies, 1):
            messages = [*messages, _reply(form, number, length), *self.added(number, added, length)]
            try:
                longer = self.written(messages, open_turn=True)
            except InputError:
                return None  # there are no such conversations
            if not longer.startswith(opened):
                return self.encoder.rewrites(opened, longer)
            piece = longer[len(opened) :]
            for what, said in _parts(messages[-1 - added]):
                if not _stands_in(said, piece):
                    return f"{name} leaves out {what} when '{self.role}' messages follow replies. {REMEDY}"
            if not all(_stands_in(str(message["content"]), piece) for message in messages[-added:]):
                return f"{name} leaves out '{self.role}' messages. Give a chat template that writes them"
            tail = self.encoder.tail(messages[:-added], messages[-added:], self.tools).from_end
            if not piece.endswith(tail):
                return (
                    f"what {name} writes after a reply depends on what the reply says: "
                    f"{piece[-len(tail) :][:40]!r} instead of {tail[:40]!r}. {REMEDY}"
                )
            opened = longer
        return None

    @cached_property
    def _format(self) -> CallFormat | None:
        return call_format(self.encoder)

    def added(self, number: int, count: int, length: int = 0) -> list[Message]:
        return [
            {
                "role": self.role,
                "content": _words(f"qzxadded{number}x{k}", length),
                **({"name": "qzxtool"} if self.role == "tool" else {}),
            }
            for k in range(count)
        ]

    def written(self, messages: Sequence[Message], *, open_turn: bool = False) -> str:
        return self.encoder.write(self.encoder.completed(messages), self.tools, open_turn=open_turn)

    def _accepts(self, messages: Sequence[Message]) -> bool:
        try:
            self.written(messages, open_turn=True)
        except InputError:
            return False
        return True


def _words(word: str, length: int) -> str:
    return f"{word} {'and on ' * (length // 7)}{word}end"


def _system() -> Message:
    return {"role": "system", "content": "qzxsystem"}


def _user(number: int, length: int = 0) -> Message:
    return {"role": "user", "content": _words(f"qzxasked{number}", length)}


def _reply(form: Form, number: int, length: int = 0) -> Message:
    thought, text = _words(f"qzxthought{number}", length), _words(f"qzxtext{number}", length) * form.text
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if form.field:
        message["reasoning_content"] = thought
    elif form.thought:
        message["content"] = f"<think>\n{thought}\n</think>\n\n{text}"
    if form.call:
        arguments = {"qzxparameter": f"qzxvalue{number}"}
        message["tool_calls"] = [
            {"type": "function", "function": {"name": "qzxtool", "arguments": arguments}}
        ]
    return message


def _parts(reply: Message) -> Iterator[tuple[str, str]]:
    """Yield what must stay of a reply, each with a name for it."""
    thought, _, text = str(reply["content"]).rpartition("</think>")
    yield "a reply's thought", thought.replace("<think>", "").strip()
    yield "a reply's thought", str(reply.get("reasoning_content", ""))
    yield "a reply's text", text.strip()
    for call in reply.get("tool_calls") or ():
        for said in (call["function"]["name"], *call["function"]["arguments"].values()):
            yield "a reply's tool call", str(said)


def _stands_in(said: str, text: str) -> bool:
    return said in text or json.dumps(said)[1:-1] in text
