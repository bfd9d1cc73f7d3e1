"""Find out whether a chat template keeps its past, by rendering conversations that grow."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_core.environments.call_formats import call_format
from rlhf_core.errors import InputError
from rlhf_core.tokenizer.encoding import Message

if TYPE_CHECKING:
    from rlhf_core.environments.conversation import ConversationEncoder

TURNS = 3
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


def history_problem(encoder: ConversationEncoder, role: str, tools: Sequence[Any] | None) -> str | None:
    """Describe what the template does to its past when messages of `role` follow replies, or return None."""
    probe = [*tools, TOOL] if tools else None
    try:
        if probe and (problem := _schema_problem(encoder, probe)):
            return problem
        return _Trial(encoder, role, probe).problem()
    except InputError as error:
        return f"{encoder.name} cannot be used for conversations with '{role}' messages: {error}"


def _schema_problem(encoder: ConversationEncoder, tools: Sequence[Any]) -> str | None:
    text = encoder.write([{"role": "user", "content": "qzxasked"}], tools, open_turn=True)
    words = {"name": "qzxtool", "description": "qzxabout", "parameters": "qzxparameter"}
    if missing := [what for what, word in words.items() if word not in text]:
        return (
            f"{encoder.name} leaves out the schemas of tools (their {', '.join(missing)}): the policy would not know "
            "what it may call. Give a chat template that writes them"
        )
    return None


class _Trial:
    """Conversations of one template in which messages of one role follow the replies."""

    def __init__(self, encoder: ConversationEncoder, role: str, tools: Sequence[Any] | None) -> None:
        self.encoder, self.role, self.tools = encoder, role, tools

    def problem(self) -> str | None:
        candidates = [*SPOKEN, *CALLING] if self.tools or self.role == "tool" else [*SPOKEN]
        refusals, differing, forms = {}, {}, []
        for form in candidates:
            try:
                differs = self._differs_at_once(form)
            except InputError as error:
                refusals[form] = error
                continue
            if differs:
                differing[form] = differs
            elif not self._unwritten(form):
                forms.append(form)
        if not forms:
            if not differing and refusals:
                return f"{self.encoder.name} refuses '{self.role}' messages after a reply: {next(iter(refusals.values()))}"
            return next(iter(differing.values()))
        if self.tools and (problem := self._call_problem(forms, refusals)):
            return problem
        for system, replies, added, length in self._conversations(forms):
            problem = self._grows(system, replies, added, length)
            if problem:
                return problem
        return None

    def _call_problem(self, forms: Sequence[Form], refusals: Mapping[Form, InputError]) -> str | None:
        """Describe why the policy's calls cannot be written, or return None."""
        if any(form.call for form in forms):
            return None
        name = self.encoder.name
        refused = [error for form, error in refusals.items() if form.call]
        if refused:
            return f"{name} refuses tool calls, or '{self.role}' messages after them: {refused[0]}"
        return f"{name} leaves out the tool calls of replies. Give a chat template that writes them"

    def _differs_at_once(self, form: Form) -> str | None:
        """Describe how the template begins a reply otherwise than its own generation prompt; None if it does not.

        A policy cannot write a reply of such a form, if another form continues the prompt.
        """
        messages = [_user(0), _reply(form, 1), *self._added(1, 1)]
        opened = self.encoder.write(messages[:1], self.tools, open_turn=True)
        later = self._written(messages, open_turn=True)
        if later.startswith(opened) or self._written(messages[:2]).startswith(opened):
            return None
        return self.encoder.rewrites(opened, later)

    def _unwritten(self, form: Form) -> bool:
        """Whether the policy writes no replies of a form: the template has no place for what sets it apart.

        Only calls that stand between marks can have text beside them.
        """
        closed = self._written([_user(0), _reply(form, 1)])
        if form.field and "qzxthought1" not in closed:
            return True
        if not form.call:
            return False
        found = call_format(self.encoder)
        return "qzxtool" not in closed or (
            (form.text or form.thought) and found is not None and not found.opening
        )

    def _conversations(self, forms: Sequence[Form]) -> Iterator[tuple[bool, Sequence[Form], int, int]]:
        """Yield whether a system message begins it, the forms of its replies, messages per turn, characters of each."""
        speaking = [form for form in forms if not form.call]
        several = [1, 2] if self._accepts([_user(0), _reply(forms[-1], 1), *self._added(1, 2)]) else [1]
        systems = [False, True] if self._accepts([_system(), _user(0)]) else [False]
        for system, added in product(systems, several):
            for a, b in product(forms, forms):
                yield system, (a, b, a, (speaking or forms)[0])[: TURNS + 1], added, 0
        yield False, forms[-1:] * LONG[0], 1, LONG[1]

    def _grows(self, system: bool, replies: Sequence[Form], added: int, length: int) -> str | None:
        """Render a conversation turn by turn; describe the first change of what was written before, or return None."""
        messages = [*([_system()] if system else []), _user(0, length)]
        opened = self._written(messages, open_turn=True)
        for number, form in enumerate(replies, 1):
            messages = [*messages, _reply(form, number, length), *self._added(number, added, length)]
            try:
                longer = self._written(messages, open_turn=True)
            except InputError:
                return None  # such a conversation cannot be had
            if not longer.startswith(opened):
                return self.encoder.rewrites(opened, longer)
            piece = longer[len(opened) :]
            for what, said in _parts(messages[-1 - added :]):
                if not _stands_in(said, piece):
                    return (
                        f"{self.encoder.name} leaves out {what} when a '{self.role}' message follows. "
                        f"{_remedy(what)}"
                    )
            tail = self.encoder.tail(messages[:-added], messages[-added:], self.tools).from_end
            if not piece.endswith(tail):
                return (
                    f"what {self.encoder.name} writes after a reply depends on what the reply says: "
                    f"{piece[-len(tail) :][:40]!r} instead of {tail[:40]!r}. {_remedy('')}"
                )
            opened = longer
        return None

    def _added(self, number: int, count: int, length: int = 0) -> list[Message]:
        return [
            {
                "role": self.role,
                "content": _words(f"qzxadded{number}x{k}", length),
                **({"name": "qzxtool"} if self.role == "tool" else {}),
            }
            for k in range(count)
        ]

    def _written(self, messages: Sequence[Message], *, open_turn: bool = False) -> str:
        return self.encoder.write(self.encoder.completed(messages), self.tools, open_turn=open_turn)

    def _accepts(self, messages: Sequence[Message]) -> bool:
        try:
            self._written(messages, open_turn=True)
        except InputError:
            return False
        return True


def _remedy(what: str) -> str:
    from rlhf_core.environments.conversation import REMEDY

    return REMEDY if not what.startswith("the content") else "Give a chat template that writes it"


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


def _parts(messages: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """Yield what must stay of a reply and the messages after it, with a name for it."""
    reply, *added = messages
    thought, _, text = str(reply["content"]).rpartition("</think>")
    yield "a reply's thought", thought.replace("<think>", "").strip()
    yield "a reply's thought", str(reply.get("reasoning_content", ""))
    yield "a reply's text", text.strip()
    for call in reply.get("tool_calls") or ():
        for said in (call["function"]["name"], *call["function"]["arguments"].values()):
            yield "a reply's tool call", str(said)
    for message in added:
        yield f"the content of a '{message['role']}' message", str(message["content"])


def _stands_in(said: str, text: str) -> bool:
    return said in text or json.dumps(said)[1:-1] in text
