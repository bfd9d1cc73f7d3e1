"""Encode conversations of several turns without re-encoding what the policy wrote.

Sampled ids stay as they are. What the environment adds is the difference of two texts, in which a fixed dummy
stands in place of each reply, so that it depends on neither the reply's words nor how they would be tokenised again:

    observation = text(… dummy + added + open turn) - text(… dummy)

It is tokenised from the special token that ends the reply, which no merge crosses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import count, permutations, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlhf_core.environments.history import REMEDY, Trial
from rlhf_core.environments.parsing import shared_length
from rlhf_core.errors import InputError
from rlhf_core.tokenizer.encoding import Encoder, Ints, Message
from rlhf_core.tokenizer.options import TextOptions

WORD, FIRST, LAST, RESULT = "qzxreply", "qzxfirst", "qzxlast", "qzxresult"
"""What dummies say: a reply's text, the arguments of its calls, and their result. No template contains them."""
DUMMIES: tuple[Mapping[str, str], ...] = (
    {"content": WORD},
    {"content": f"<think>\nqzxthought\n</think>\n\n{WORD}"},
    {"content": WORD, "reasoning_content": "qzxthought"},
)
"""Replies; a template writes at least one of them after its own generation prompt."""


class CallStyle(NamedTuple):
    """How a template takes tool calls. as_text: arguments as JSON text. most: calls per reply; None: any number.
    alone: whether a text next to calls would come after their results.
    """

    as_text: bool = False
    most: int | None = None
    alone: bool = False


STYLES = (
    CallStyle(),
    CallStyle(alone=True),
    CallStyle(True),
    CallStyle(False, 1),
    CallStyle(True, 1),
    CallStyle(False, 0),
)


class Tail(NamedTuple):
    """Text of a conversation after its last reply, up to the next open turn. text: begins where the reply ends.

    end: the token that the template ends replies with, and its characters; None: it writes none.
    bordered: whether only white space stands between the reply and that token.
    """

    text: str
    end: int | None = None
    start: int = 0
    stop: int = 0
    bordered: bool = True

    @property
    def from_end(self) -> str:
        """The text from the token that ends the reply, or all of it."""
        return self.text[self.start :]


class ConversationEncoder:
    """Encode prompts, and what an environment adds to a conversation, with one tokenizer and chat template."""

    def __init__(
        self, tokenizer: Any, options: str | TextOptions | None = None, stop_ids: Sequence[int] = ()
    ) -> None:
        """options: as for `Encoder`. stop_ids: tokens that end a reply, besides those of `special_ids`."""
        self.encoder = Encoder(tokenizer, options)
        self.tokenizer = tokenizer
        self.stop_ids = tuple(dict.fromkeys([*self.encoder.special.eos, *map(int, stop_ids)]))
        self._problems: dict[tuple[str, str, bool, bool], str | None] = {}

    @property
    def name(self) -> str:
        """The template as messages name it."""
        given = self.encoder.options.chat_template
        if given is None:
            return "the tokenizer's chat template"
        if "{%" in given or "{{" in given:
            return "the given chat template"
        return f"the chat template {given if given == 'plain' else Path(given).name}"

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Ints:
        """Encode a conversation, int32 [n], ending with the open header of the assistant's turn.

        tools: JSON schemas of what the policy may call. Raises InputError if the template refuses the conversation.
        """
        return self.encoder.prompts([self.with_call_ids(messages)], [tools])[0]

    def observation(
        self,
        messages: Sequence[Message],
        added: Sequence[Message],
        *,
        ended_by: int | None,
        tools: Sequence[Any] | None = None,
    ) -> Ints:
        """Encode what follows the policy's last reply, int32 [n]: `added`, and the header of its next turn.

        messages: the conversation, which ends with that reply. ended_by: the stop token that the reply ends with, which
        is not repeated even if the template ends replies with another one; None: the reply was cut, and the
        template's own comes first.

        Raises InputError if the template refuses the conversation or changes what stands before `added`.
        """
        roles = list(dict.fromkeys(str(message["role"]) for message in added))
        problem = self.problem(tools=tools, roles=roles)
        if problem:
            raise InputError(problem)
        tail = self.tail(messages, added, tools)
        stop = "" if ended_by is None else self._added(ended_by)
        if tail.end is not None:
            ids = self._tokenize(tail.from_end)
            if ids[0] == tail.end and (ended_by is not None or tail.bordered):
                return ids if ended_by is None else ids[1:]
        if ended_by is None:
            return self._after(WORD, tail.text)
        if tail.end is None and stop:
            # The token that ended this turn may begin the next one.
            return self._after(stop, tail.text.removeprefix(stop))
        return self._after(stop or WORD, tail.text[tail.stop :])

    def problem(
        self, *, tools: Sequence[Any] | None, roles: Sequence[str], encoded_again: bool = False
    ) -> str | None:
        """Describe why conversations in which messages of these roles follow replies cannot be had; None if they can.

        A template must take such messages and, with `tools`, write their schemas, the calls and the results. It must
        keep what it wrote before, for all replies, unless the whole conversation is `encoded_again` in
        each turn.
        """
        for pair in [*((role, role) for role in roles), *permutations(roles, 2)]:
            key = (*pair, bool(tools), encoded_again)
            if key not in self._problems:
                trial = Trial(self, *pair, tools)
                self._problems[key] = trial.refusal() or (None if encoded_again else trial.change())
            problem = self._problems[key]
            if problem:
                return problem
        return None

    def write(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, open_turn: bool = False
    ) -> str:
        """Render a conversation as `ChatTemplate.write` does."""
        return self.encoder.chat.write(messages, tools=tools, open_turn=open_turn)

    def with_call_ids(self, messages: Sequence[Message]) -> list[Message]:
        """Give calls and results the ids that they lack, and write arguments as the template takes them."""
        completed: list[Message] = []
        awaited: list[str] = []
        unused = (f"{number:09d}" for number in count())  # nine characters, as some templates demand
        for message in messages:
            calls = message.get("tool_calls")
            if calls:
                calls = [{**call, "id": call.get("id") or next(unused)} for call in calls]
                awaited = [str(call["id"]) for call in calls]
                message = {**message, "tool_calls": [self._with_arguments(call) for call in calls]}
            elif message["role"] == "tool":
                answered = awaited.pop(0) if awaited else next(unused)
                message = {**message, "tool_call_id": message.get("tool_call_id") or answered}
            completed.append(message)
        return completed

    def tail(
        self, messages: Sequence[Message], added: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> Tail:
        """Render what follows the last reply, with dummies in place of replies. Raises InputError as `observation`."""
        whole = self._with_dummies(self.with_call_ids([*messages, *added]))
        last = len(messages) - 1
        calls = bool(whole[last].get("tool_calls"))
        before = self.write(whole[:last], tools, open_turn=True)
        after = self.write(whole, tools, open_turn=True)
        if not after.startswith(before):
            raise InputError(self.rewrites(before, after))
        closed = self.write(whole[: last + 1], tools)
        # The word that the dummy ends with; messages may contain it, too.
        word = max((WORD, LAST), key=closed.rfind)
        if closed.count(word) <= before.count(word):
            raise InputError(f"{self.name} omits the content of a reply. {REMEDY}")
        text = after[len(before) :].partition(word)[2]
        closed = closed.rpartition(word)[2]
        shared = text[: shared_length(text, closed)]
        ends = [(shared.find(stop), -len(stop), i) for i, stop in self.stops.items() if stop in shared]
        if ends:
            start, length, token = min(ends)
            bordered = calls or not text[:start].strip()
            return Tail(text, token, start, start - length, bordered)
        if not calls:
            return Tail(text)
        # No token ends the reply: its calls end where what follows a reply without calls begins.
        whole[last] = {"role": "assistant", **self._dummy}
        try:
            plain = self.write(whole, tools, open_turn=True)[len(before) :].partition(WORD)[2]
        except InputError:
            plain = None
        if plain is None or not text.endswith(plain):
            raise InputError(
                f"{self.name} writes no stop token after a reply with tool calls, so its end cannot be found. "
                "Add the token it writes there to sampling.stop_token_ids"
            )
        return Tail(plain)

    def rewrites(self, before: str, after: str) -> str:
        """Word the error for a text that does not begin with the one before it."""
        same = shared_length(before, after)
        start = max(0, same - 20)
        return (
            f"{self.name} rewrites earlier text when the conversation continues: {before[start : same + 30]!r} becomes "
            f"{after[start : same + 30]!r}. {REMEDY}"
        )

    def _with_dummies(self, messages: Sequence[Message]) -> list[Message]:
        """Put dummies in place of replies, each with a call for every result that follows it."""
        dummied: list[Message] = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                following = takewhile(lambda m: m["role"] != "assistant", messages[number + 1 :])
                results = [m for m in following if m["role"] == "tool"]
                message = self._dummy_reply(message, results, self._style)
            dummied.append(message)
        return dummied

    def _dummy_reply(self, message: Message, results: Sequence[Message], style: CallStyle) -> Message:
        """Make a dummy with a call for each result, which have ids, as far as the style takes them."""
        results = results[: style.most]
        if not results:
            return {"role": "assistant", **self._dummy}
        written = [call.get("function", {}).get("name") for call in message.get("tool_calls") or ()]
        calls = []
        for k, result in enumerate(results):
            name = result.get("name") or (written[k] if k < len(written) else None) or "call"
            function = {"name": name, "arguments": {"argument": LAST if k == len(results) - 1 else FIRST}}
            call = {"type": "function", "function": function, "id": result["tool_call_id"]}
            calls.append(_as_text(call) if style.as_text else call)
        return {"role": "assistant", **({"content": ""} if style.alone else self._dummy), "tool_calls": calls}

    def _with_arguments(self, call: Message) -> Message:
        return _as_text(call) if self._style.as_text else call

    @cached_property
    def _dummy(self) -> Mapping[str, str]:
        """The first dummy that the template writes after its own generation prompt."""
        asked = {"role": "user", "content": "a"}
        for dummy in DUMMIES:
            try:
                opened = self.write([asked], open_turn=True)
                if self.write([asked, {"role": "assistant", **dummy}]).startswith(opened):
                    return dummy
            except InputError:
                continue
        return DUMMIES[0]

    @cached_property
    def _style(self) -> CallStyle:
        """The first way of writing calls that the template does not refuse."""
        asked = {"role": "user", "content": "a"}
        for style in STYLES:
            results = [
                {"role": "tool", "name": "call", "content": RESULT, "tool_call_id": f"{k:09d}"}
                for k in range(2 if style.most is None else 1)
            ]
            reply = self._dummy_reply({}, results, style)
            try:
                text = self.write([asked, reply, *results], open_turn=True)
            except InputError:
                continue
            if text.rfind(WORD) < text.rfind(RESULT) or RESULT not in text:
                return style
        return STYLES[-1]

    @cached_property
    def stops(self) -> dict[int, str]:
        """{id: text} of the stop tokens that text is split at."""
        return {i: text for i in self.stop_ids if (text := self._added(i))}

    def _added(self, token: int) -> str:
        """Return the text of a token that text is split at; empty for another token."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {}).get(token)
        return "" if added is None or not added.content.strip() else str(added.content)

    def _after(self, context: str, text: str) -> Ints:
        """Tokenise a text as it is tokenised after another. Raises InputError if a token holds parts of both."""
        before = self._tokenize(context)
        whole = self._tokenize(context + text)
        if not np.array_equal(whole[: len(before)], before):
            raise InputError(
                f"the tokenizer merges the end of a reply with what {self.name} writes next: give a template that "
                "ends replies with a special token"
            )
        return whole[len(before) :]

    def _tokenize(self, text: str) -> Ints:
        ids = self.tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return np.array(ids["input_ids"], np.int32)


def _as_text(call: Message) -> Message:
    function = dict(call.get("function") or {})
    if not isinstance(function.get("arguments"), str):
        function["arguments"] = json.dumps(function.get("arguments", {}), ensure_ascii=False)
    return {**call, "function": function}
