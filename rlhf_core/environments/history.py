"""Find out, before a run, whether a chat template refuses, drops or rewrites the turns of conversations that grow."""

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
ASKED: Message = {"role": "user", "content": "qzxasked end"}


class ReplyForm(NamedTuple):
    """What a reply holds. thought: the mark that opens one in its text, or "field": it is its `reasoning_content`."""

    text: bool = True
    thought: str = ""
    call: bool = False


SPOKEN = (ReplyForm(), ReplyForm(thought="<think>"), ReplyForm(thought="field"), ReplyForm(thought="[THINK]"))
CALLING = (
    ReplyForm(text=False, call=True),
    ReplyForm(call=True),
    ReplyForm(text=False, thought="<think>", call=True),
    ReplyForm(thought="<think>", call=True),
    ReplyForm(thought="field", call=True),
)


class Trial:
    """Conversations of one template in which messages of `role`, and then of role `then`, in turn, follow the replies.

    tools: JSON schemas, which the template must write, as it must the calls.
    """

    def __init__(
        self, encoder: ConversationEncoder, role: str, then: str, tools: Sequence[Any] | None
    ) -> None:
        self.encoder, self.role, self.then = encoder, role, then
        self.tools = [*tools, TOOL] if tools else None

    def refusal(self) -> str | None:
        """Describe what the template refuses or leaves out of the shortest such conversation, or return None."""
        name = self.encoder.name
        if self.tools:
            try:
                text = self.written([ASKED], open_turn=True)
            except InputError as error:
                return f"{name} refuses tools: {error}"
            words = {"name": "qzxtool", "description": "qzxabout", "parameters": "qzxparameter"}
            missing = [what for what, word in words.items() if word not in text]
            if missing:
                return (
                    f"{name} omits the schemas of tools (their {', '.join(missing)}): the policy would not know "
                    "what it may call. Give a chat template that writes them"
                )
        refusals = []
        for form in (CALLING[0],) if self.tools else (ReplyForm(), ReplyForm(call=True)):
            messages = [ASKED, _reply(form, 1), *self.added(1)]
            try:
                text = self.written(messages, open_turn=True)
            except InputError as error:
                refusals.append(str(error))
                continue
            if self.tools and "qzxvalue1" not in self.written(messages[:2]):
                return f"{name} omits the tool calls of replies. Give a chat template that writes them"
            if "qzxadded1" in text:
                return None
            if form.call or self.role != "tool":  # Gemma 4 writes results after calls alone
                return f"{name} omits '{self.role}' messages. Give a chat template that writes them"
        what = "tool calls, or " if self.tools else ""
        return f"{name} refuses {what}'{self.role}' messages after a reply: {refusals[0]}"

    def change(self) -> str | None:
        """Describe what the template does to earlier turns of longer conversations, or return None."""
        try:
            forms, changes = self.forms()
            if not forms:
                return next(iter(changes), f"{self.encoder.name} leaves out what replies say. {REMEDY}")
            last = next((form for form in forms if not form.call), forms[0])
            replies = [*forms, last, *reversed(forms), last]
            begun = [[ASKED]]
            if self.then == self.role:
                begun.append([{"role": "system", "content": "qzxsystem"}, ASKED])
            return next((change for each in begun if (change := self.growth(each, replies))), None)
        except InputError as error:
            words = str(error)
            named = f"{self.encoder.name} fails on '{self.role}' messages: {words}"
            return words if self.encoder.name in words else named

    def forms(self) -> tuple[list[ReplyForm], list[str]]:
        """Return the forms of replies that a policy may write, and how the template changes its prompt for others."""
        forms: list[ReplyForm] = []
        changes: list[str] = []
        opened = self.written([ASKED], open_turn=True)
        for form in (*SPOKEN, *(CALLING if self.tools or self.role == "tool" else ())):
            messages = [ASKED, _reply(form, 1)]
            try:
                closed = self.written(messages)
                later = self.written([*messages, *self.added(1)], open_turn=True)
            except InputError:
                continue  # what the template refuses is no part of a conversation
            if self.role == "tool" and not form.call and "qzxadded1" not in later:
                continue
            if not (later.startswith(opened) or closed.startswith(opened)):
                changes.append(self.encoder.rewrites(opened, later))
            elif self._has_place_for(form, closed):
                forms.append(form)
        return forms, changes

    def _has_place_for(self, form: ReplyForm, closed: str) -> bool:
        """Return whether the template writes what sets a form apart, so that a policy may write it."""
        if form.thought == "field" and "qzxthought1" not in closed:
            return False
        if form.call and "qzxvalue1" not in closed:
            return False
        if form.call and (form.text or form.thought):
            # Where a text next to calls is left out, `CallParser` makes no such replies; where it would come after
            # their results, what the policy wrote stands elsewhere.
            messages = [ASKED, _reply(ReplyForm(call=True), 1)]
            later = self.written([*messages, *self.added(1)])
            displaced = later.find("qzxtext1") > later.find("qzxadded1")
            return "qzxtext1" in self.written(messages) and not displaced
        return True

    def growth(self, messages: Sequence[Message], replies: Sequence[ReplyForm]) -> str | None:
        """Render a conversation turn by turn, and describe the first change of what was written before."""
        name = self.encoder.name
        try:
            opened = self.written(messages, open_turn=True)
        except InputError:
            return None  # there are no such conversations
        for number, form in enumerate(replies, 1):
            messages = [*messages, _reply(form, number)]
            added = self.added(number)
            try:
                longer = self.written([*messages, *added], open_turn=True)
            except InputError:
                return None
            if not longer.startswith(opened):
                return self.encoder.rewrites(opened, longer)
            piece = longer[len(opened) :]
            for what, said in _parts(messages[-1]):
                if not _stands_in(said, piece):
                    return f"{name} omits {what} when '{self.role}' messages follow replies. {REMEDY}"
            if not all(_stands_in(str(message["content"]), piece) for message in added):
                return f"{name} omits '{self.role}' messages. Give a chat template that writes them"
            tail = self.encoder.tail(messages, added, self.tools).from_end
            if not piece.endswith(tail):
                return (
                    f"what {name} writes after a reply depends on what the reply says: "
                    f"{piece[-len(tail) :][:40]!r} instead of {tail[:40]!r}. {REMEDY}"
                )
            messages, opened = [*messages, *added], longer
        return None

    def added(self, number: int) -> list[Message]:
        """Make the message that follows a reply."""
        role = self.role if number % 2 else self.then
        return [
            {
                "role": role,
                "content": f"qzxadded{number} end",
                **({"name": "qzxtool"} if role == "tool" else {}),
            }
        ]

    def written(self, messages: Sequence[Message], *, open_turn: bool = False) -> str:
        return self.encoder.write(self.encoder.with_call_ids(messages), self.tools, open_turn=open_turn)


def _reply(form: ReplyForm, number: int) -> Message:
    thought = f"qzxthought{number} end"
    text = f"qzxtext{number} end" * form.text
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if form.thought == "field":
        message["reasoning_content"] = thought
    elif form.thought:
        closing = f"{form.thought[0]}/{form.thought[1:]}"
        message["content"] = f"{form.thought}\n{thought}\n{closing}\n\n{text}"
    if form.call:
        function = {"name": "qzxtool", "arguments": {"qzxparameter": f"qzxvalue{number}"}}
        message["tool_calls"] = [{"type": "function", "function": function}]
    return message


def _parts(reply: Message) -> Iterator[tuple[str, str]]:
    """Yield what must stay of a reply, each with a name for it."""
    said = f"{reply['content']} {reply.get('reasoning_content', '')}"
    for what in ("thought", "text"):
        match = re.search(rf"qzx{what}\d+ end", said)
        if match:
            yield f"a reply's {what}", match[0]
    for call in reply.get("tool_calls") or ():
        for said in (call["function"]["name"], *call["function"]["arguments"].values()):
            yield "a reply's tool call", str(said)


def _stands_in(said: str, text: str) -> bool:
    return said in text or json.dumps(said)[1:-1] in text
