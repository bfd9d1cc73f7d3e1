"""Find out whether a chat template rewrites earlier turns, by rendering conversations that grow."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_core.errors import InputError
from rlhf_core.tokenizer.encoding import Message

if TYPE_CHECKING:
    from rlhf_core.environments.conversation import ConversationEncoder

REMEDY = 'Set environment.history = "encoded_again", or give a chat template that keeps earlier turns'
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
    """What a reply holds. thought: in the "text", between `marks`, or in a "field" of its own, `reasoning_content`."""

    text: bool = True
    thought: str = ""
    call: bool = False
    marks: tuple[str, str] = ("<think>", "</think>")


SPOKEN = (
    Form(),
    Form(thought="text"),
    Form(thought="field"),
    Form(thought="text", marks=("[THINK]", "[/THINK]")),
)
CALLING = (
    Form(text=False, call=True),
    Form(call=True),
    Form(text=False, thought="text", call=True),
    Form(thought="text", call=True),
    Form(thought="field", call=True),
)


def template_problem(
    encoder: ConversationEncoder, role: str, tools: Sequence[Any] | None, then: str
) -> str | None:
    """Describe what the template refuses or leaves out of a conversation in which messages of `role` follow replies.

    tools: JSON schemas, which it must write, as it must the calls. then: the role after every other reply. Return None
    if nothing is missing.
    """
    name = encoder.name
    trial = _Trial(encoder, role, [*tools, TOOL] if tools else None, then)
    if tools:
        try:
            text = trial.written([_user(0)], open_turn=True)
        except InputError as error:
            return f"{name} refuses tools: {error}"
        words = {"name": "qzxtool", "description": "qzxabout", "parameters": "qzxparameter"}
        if missing := [what for what, word in words.items() if word not in text]:
            return (
                f"{name} leaves out the schemas of tools (their {', '.join(missing)}): the policy would not know "
                "what it may call. Give a chat template that writes them"
            )
    refusals = []
    for form in (CALLING[0],) if tools else (Form(), Form(call=True)):
        messages = [_user(0), _reply(form, 1), *trial.added(1)]
        try:
            text = trial.written(messages, open_turn=True)
        except InputError as error:
            refusals.append(str(error))
            continue
        if tools and "qzxvalue1" not in trial.written(messages[:2]):
            return f"{name} leaves out the tool calls of replies. Give a chat template that writes them"
        if "qzxadded1" not in text:
            return f"{name} leaves out '{role}' messages. Give a chat template that writes them"
        return None
    what = "tool calls, or " if tools else ""
    return f"{name} refuses {what}'{role}' messages after a reply: {refusals[0]}"


def history_problem(
    encoder: ConversationEncoder, role: str, tools: Sequence[Any] | None, then: str
) -> str | None:
    """Describe what the template does to its past when messages of `role` follow replies, or return None.

    then: the role after every other reply.
    """
    trial = _Trial(encoder, role, [*tools, TOOL] if tools else None, then)
    try:
        forms, changes = trial.forms()
        if not forms:
            return next(iter(changes), f"{encoder.name} leaves out what replies say. {REMEDY}")
        last = next((form for form in forms if not form.call), forms[0])
        mixed = [*forms, last, *reversed(forms), last]
        conversations: list[tuple[Sequence[Message], Sequence[Form], int]] = [([_user(0)], mixed, 0)]
        if then == role:
            conversations.append(([_system(), _user(0)], mixed, 0))
            conversations.append(([_user(0, LONG[1])], [forms[-1]] * LONG[0], LONG[1]))
        problems = (trial.growth_problem(*each) for each in conversations)
        return next((problem for problem in problems if problem), None)
    except InputError as error:
        words = str(error)
        return words if encoder.name in words else f"{encoder.name} fails on '{role}' messages: {words}"


class _Trial:
    """Conversations of one template in which messages of one role, or two in turn, follow the replies."""

    def __init__(
        self, encoder: ConversationEncoder, role: str, tools: Sequence[Any] | None, then: str
    ) -> None:
        self.encoder, self.role, self.tools, self.then = encoder, role, tools, then

    def forms(self) -> tuple[list[Form], list[str]]:
        """Return the forms of replies that a policy may write, and how the template changes its prompt for others."""
        forms: list[Form] = []
        changes: list[str] = []
        opened = self.written([_user(0)], open_turn=True)
        for form in (*SPOKEN, *(CALLING if self.tools or self.role == "tool" else ())):
            messages = [_user(0), _reply(form, 1)]
            try:
                closed = self.written(messages)
                later = self.written([*messages, *self.added(1)], open_turn=True)
            except InputError:
                continue  # what the template refuses is no part of a conversation
            if not (later.startswith(opened) or closed.startswith(opened)):
                changes.append(self.encoder.rewrites(opened, later))
            elif self._has_place_for(form, closed):
                forms.append(form)
        return forms, changes

    def _has_place_for(self, form: Form, closed: str) -> bool:
        """Return whether the template writes what sets a form apart, so that a policy may write it."""
        if form.thought == "field" and "qzxthought1" not in closed:
            return False
        if form.call and "qzxvalue1" not in closed:
            return False
        if form.call and (form.text or form.thought):
            # Where a text next to calls is left out, `CallParser` makes no such replies.
            return "qzxtext1" in self.written([_user(0), _reply(Form(call=True), 1)])
        return True

    def growth_problem(self, messages: Sequence[Message], replies: Sequence[Form], length: int) -> str | None:
        """Render a conversation turn by turn, and describe the first change of what was written before."""
        name = self.encoder.name
        try:
            opened = self.written(messages, open_turn=True)
        except InputError:
            return None  # there are no such conversations
        for number, form in enumerate(replies, 1):
            messages = [*messages, _reply(form, number, length)]
            added = self.added(number, length)
            try:
                longer = self.written([*messages, *added], open_turn=True)
            except InputError:
                return None
            if not longer.startswith(opened):
                return self.encoder.rewrites(opened, longer)
            piece = longer[len(opened) :]
            for what, said in _parts(messages[-1]):
                if not _stands_in(said, piece):
                    return f"{name} leaves out {what} when '{self.role}' messages follow replies. {REMEDY}"
            if not all(_stands_in(str(message["content"]), piece) for message in added):
                return f"{name} leaves out '{self.role}' messages. Give a chat template that writes them"
            tail = self.encoder.tail(messages, added, self.tools).from_end
            if not piece.endswith(tail):
                return (
                    f"what {name} writes after a reply depends on what the reply says: "
                    f"{piece[-len(tail) :][:40]!r} instead of {tail[:40]!r}. {REMEDY}"
                )
            messages, opened = [*messages, *added], longer
        return None

    def added(self, number: int, length: int = 0) -> list[Message]:
        """Make the message that follows a reply."""
        role = self.role if number % 2 else self.then
        name = {"name": "qzxtool"} if role == "tool" else {}
        return [{"role": role, "content": _words(f"qzxadded{number}", length), **name}]

    def written(self, messages: Sequence[Message], *, open_turn: bool = False) -> str:
        return self.encoder.write(self.encoder.completed(messages), self.tools, open_turn=open_turn)


def _words(word: str, length: int) -> str:
    return f"{word} {'and on ' * (length // 7)}{word}end"


def _system() -> Message:
    return {"role": "system", "content": "qzxsystem"}


def _user(number: int, length: int = 0) -> Message:
    return {"role": "user", "content": _words(f"qzxasked{number}", length)}


def _reply(form: Form, number: int, length: int = 0) -> Message:
    thought, text = _words(f"qzxthought{number}", length), _words(f"qzxtext{number}", length) * form.text
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if form.thought == "field":
        message["reasoning_content"] = thought
    elif form.thought:
        message["content"] = f"{form.marks[0]}\n{thought}\n{form.marks[1]}\n\n{text}"
    if form.call:
        arguments = {"qzxparameter": f"qzxvalue{number}"}
        message["tool_calls"] = [
            {"type": "function", "function": {"name": "qzxtool", "arguments": arguments}}
        ]
    return message


def _parts(reply: Message) -> Iterator[tuple[str, str]]:
    """Yield what must stay of a reply, each with a name for it."""
    said = f"{reply['content']} {reply.get('reasoning_content', '')}"
    for what in ("thought", "text"):
        if match := re.search(rf"qzx{what}\d+ .*qzx{what}\d+end", said):
            yield f"a reply's {what}", match[0]
    for call in reply.get("tool_calls") or ():
        for said in (call["function"]["name"], *call["function"]["arguments"].values()):
            yield "a reply's tool call", str(said)


def _stands_in(said: str, text: str) -> bool:
    return said in text or json.dumps(said)[1:-1] in text
