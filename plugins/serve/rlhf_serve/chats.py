"""Chats: prompts made from messages by the chat template, and messages with tool calls read from completions."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from rlhf_http.answers import chat_completion, finish_reason
from rlhf_http.fields import BadRequest, ChatRequest, Tokenize, refuse_ignored, require_short

from rlhf_core.data.columns import message_problem
from rlhf_core.environments import CallParser
from rlhf_core.environments.parsing import PYTHON_TAG
from rlhf_core.errors import InputError
from rlhf_core.tokenizer.calls import with_parsed_parameters
from rlhf_core.tokenizer.options import kwargs_problem, with_joined_parts
from rlhf_serve.answers import (
    NamedModel,
    Prepared,
    SampledRequest,
    changes,
    finite,
    make_generation_params,
    read_prompt,
    room,
    token_text,
    versions,
)

if TYPE_CHECKING:
    from rlhf_serve.pending import PendingCompletion


def encode_chat(body: ChatRequest | Tokenize, target: NamedModel) -> np.ndarray:
    """Encode a conversation as its chat template says, int32 [n]. Raises BadRequest for one that cannot be."""
    served = target.served
    given = body.messages or []
    messages = [with_joined_parts({k: v for k, v in each.items() if v is not None}) for each in given]
    problem = message_problem(messages)
    if problem:
        raise BadRequest(f"messages: {problem}", param="messages")
    _check_tools(body.tools or [])
    kwargs = _template_kwargs(body)
    if served.encoder.template is None:
        raise BadRequest(
            f"messages: {target.name} has no chat template; serve it with --chat-template, or ask /v1/completions",
            param="messages",
        )
    try:
        if any(each.get("tool_calls") or each["role"] == "tool" for each in messages):
            messages = served.conversations.with_call_ids(messages)
        text, special = _text(body, target, messages, kwargs or None)
    except InputError as error:
        raise BadRequest(f"messages: {error}", param="messages") from None
    require_short([text], served.length, "messages")
    special = special if body.add_special_tokens is None else body.add_special_tokens
    return served.encoder.tokenize_open([(text, special)])[0]


def _check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    if not all(isinstance(tool.get("function"), dict) for tool in tools):
        raise BadRequest(
            'tools: each is {"type": "function", "function": {"name": …, "parameters": {…}}}', param="tools"
        )
    try:
        with_parsed_parameters(tools)
    except InputError as error:
        raise BadRequest(f"tools: {error}", param="tools") from None


def _template_kwargs(body: ChatRequest | Tokenize) -> dict[str, Any]:
    """Return the variables that a request gives the chat template."""
    kwargs = dict(body.chat_template_kwargs or {})
    problem = kwargs_problem(kwargs)
    if problem:
        raise BadRequest(f"chat_template_kwargs {problem}", param="chat_template_kwargs")
    if isinstance(body, ChatRequest) and body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    return kwargs


def _text(
    body: ChatRequest | Tokenize,
    target: NamedModel,
    messages: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
) -> tuple[str, bool]:
    """Render messages; also, whether the tokenizer adds special tokens to the text."""
    encoder = target.served.encoder
    tools = body.tools or None
    if not body.continue_final_message:
        return encoder.text(messages, open_turn=body.add_generation_prompt, tools=tools, kwargs=kwargs)
    last = messages[-1]
    if last["role"] != "assistant":
        raise BadRequest("continue_final_message: the last message is not the assistant's", param="messages")
    text, special = encoder.text(messages[:-1], open_turn=True, tools=tools, kwargs=kwargs)
    return text + str(last.get("content") or ""), special


@dataclass
class Calling:
    """How the tool calls and thoughts of a reply are found. Without tools, nothing is a call."""

    parser: CallParser
    at_once: bool
    """Whether a reply may have several calls."""

    def so_far(self, pending: PendingCompletion) -> tuple[str, str]:
        """Return the content and the thought of a reply that is not over, without what may become something else."""
        if not self.parser.has_channels:
            return pending.text[: min(pending.settled, self._holds_from(pending))], ""
        return ("", "") if pending.generation.stop else self.parser.so_far(pending.tokens)

    def _holds_from(self, pending: PendingCompletion) -> int:
        """Return from which character on the text of a reply that is not over may belong to a call."""
        form, text = self.parser.format, pending.text
        if form is None:
            return len(text)
        if not form.opening:  # a call is the whole reply
            start = text.lstrip()[: len(PYTHON_TAG)]
            return 0 if not start or start[0] in "{[" or PYTHON_TAG.startswith(start) else len(text)
        mark = form.opening.split()[0]
        at = text.find(mark)
        if at >= 0:
            return at
        special = pending.reader.special_ids
        for token, end in zip(pending.tokens, [0, *pending.text_ends], strict=False):
            if special.get(token) == mark:
                return end
        return next(
            (len(text) - n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), len(text)
        )

    def message(self, pending: PendingCompletion) -> dict[str, Any]:
        """Write a finished reply as a message."""
        channels, stop = self.parser.has_channels, pending.stop_reason
        if self.parser.format is None and not channels:
            return {"role": "assistant", "content": pending.text}
        whole = channels or not isinstance(stop, str)  # the text lacks the marks of channels
        found = self.parser.message(pending.tokens) if whole else self.parser.parse(pending.text)
        if channels and isinstance(stop, str):
            before, mark, _ = found["content"].partition(stop)
            found["content"] = before + mark * pending.generation.keeps_stop
        thought = found.get("thinking") or found.get("reasoning_content")
        thoughts = {"reasoning_content": thought} if thought else {}
        calls = [
            {
                "id": call.get("id") or f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                },
            }
            for call in found.get("tool_calls", ())
        ]
        if not calls:
            return {
                "role": "assistant",
                "content": found["content"] if channels else pending.text,
                **thoughts,
            }
        content = found["content"] or None
        return {
            "role": "assistant",
            "content": content,
            **thoughts,
            "tool_calls": calls if self.at_once else calls[:1],
        }


def calling(body: ChatRequest, target: NamedModel) -> Calling:
    """Find how a request's tool calls are read. Raises BadRequest for a choice that cannot be forced."""
    if body.tool_choice not in (None, "auto", "none"):
        raise BadRequest(
            "tool_choice: 'auto' and 'none' are supported; a call cannot be forced", param="tool_choice"
        )
    if body.tool_choice == "auto" and not body.tools:
        raise BadRequest("tool_choice: there are no tools", param="tool_choice")
    tools = body.tools if body.tool_choice != "none" else None
    try:
        return Calling(CallParser(target.served.conversations, tools), body.parallel_tool_calls is not False)
    except InputError as error:
        raise BadRequest(f"tools: {error}", param="tools") from None


def prepare_chat(body: ChatRequest, target: NamedModel) -> Prepared:
    """Encode and check a request for a chat's next message. Raises BadRequest."""
    refuse_ignored(body)
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs: has no effect without logprobs = true", param="top_logprobs")
    prompt = encode_chat(body, target)
    if body.truncate_prompt_tokens:
        prompt = prompt[-body.truncate_prompt_tokens :]
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if wanted == 0:
        raise BadRequest(f"{name}: must be at least 1", param=name)
    limit = room(target, [prompt], wanted, name)
    generation = make_generation_params(
        body, target, limit, (body.top_logprobs or 0) if body.logprobs else None
    )
    return Prepared(
        body.request_id or f"chatcmpl-{uuid.uuid4().hex}",
        target,
        [prompt],
        body.n or 1,
        generation,
        continues_text=body.continue_final_message,
        reads_prompt=body.prompt_logprobs is not None,
        per_token=bool(body.tools),
        streams=bool(body.stream),
    )


def chat_logprobs(
    body: ChatRequest, call: SampledRequest, pending: PendingCompletion, start: int, end: int
) -> dict[str, Any]:
    """Write the log-probabilities of tokens `start` to `end`, as OpenAI's chats have them."""
    as_id = bool(body.return_tokens_as_token_ids)

    def one(token: int, logp: float) -> dict[str, Any]:
        written = call.target.served.token_bytes(token)
        return {"token": token_text(call, token, as_id), "logprob": finite(logp), "bytes": list(written)}

    content = []
    for i in range(start, end):
        ids, logps = pending.likeliest[i] if body.top_logprobs else ([], [])
        top = [one(token, logp) for token, logp in zip(ids, logps, strict=True)]
        content.append({**one(pending.tokens[i], pending.logps[i]), "top_logprobs": top})
    return {"content": content}


def chat_answer(body: ChatRequest, call: SampledRequest, tools: Calling) -> dict[str, Any]:
    """Write the answer to a request for a chat's next message."""
    choices = []
    for pending in call.completions:
        message = tools.message(pending)
        choices.append(
            {
                "index": pending.index,
                "message": {**message, "refusal": None},
                "logprobs": chat_logprobs(body, call, pending, 0, len(pending.tokens))
                if body.logprobs
                else None,
                "finish_reason": finish_reason(pending.finish_reason, message),
                "stop_reason": pending.stop_reason,
                "token_ids": pending.tokens if body.return_token_ids else None,
                "weight_versions": versions(pending),
            }
        )
    return {
        **chat_completion(call.id, call.created, call.target.name, choices, call.usage()),
        "prompt_logprobs": read_prompt(body, call, call.completions[0]),
        "prompt_token_ids": call.prompts[0].tolist() if body.return_token_ids else None,
    }


def _last_delta(message: Mapping[str, Any], before: str, thought_before: str) -> dict[str, Any]:
    """Return what of a whole message was not sent yet. before, thought_before: what was."""
    whole = message["content"] or ""
    # A message with calls has no white space before its content, which may have been sent.
    written = next((text for text in (before, before.lstrip()) if whole.startswith(text)), whole)
    delta: dict[str, Any] = {"content": whole[len(written) :]}
    thought = message.get("reasoning_content", "")
    rest = thought[len(thought_before) * thought.startswith(thought_before) :]
    if rest:
        delta["reasoning_content"] = rest
    calls = message.get("tool_calls")
    if not calls:
        return delta
    delta["tool_calls"] = [{"index": i, **each} for i, each in enumerate(calls)]
    return {name: value for name, value in delta.items() if value}


async def chat_stream(
    body: ChatRequest, call: SampledRequest, tools: Calling
) -> AsyncIterator[dict[str, Any]]:
    """Yield the parts of the answer to a request for a chat's next message.

    Text that may belong to a tool call is held back; calls come whole, once the reply is over. A thought in a channel
    of its own comes as `reasoning_content`.
    """
    head = {
        "id": call.id,
        "object": "chat.completion.chunk",
        "created": call.created,
        "model": call.target.name,
    }
    options = body.stream_options
    first: dict[str, Any] = {"prompt_token_ids": call.prompts[0].tolist()} if body.return_token_ids else {}
    for pending in call.completions:
        opening = {"role": "assistant", "content": ""}
        choice = {"index": pending.index, "delta": opening, "logprobs": None, "finish_reason": None}
        yield {**head, "choices": [choice], **first}
    sent = {pending.number: ("", "") for pending in call.completions}
    async for pending, start, _ in changes(call):
        before, thought_before = sent[pending.number]
        message: dict[str, Any] = {}
        if pending.over:
            message = tools.message(pending)
            delta = _last_delta(message, before, thought_before)
        else:
            content, thought = tools.so_far(pending)
            sent[pending.number] = content, thought
            delta = {"content": content[len(before) :]}
            rest = thought[len(thought_before) :]
            if rest:
                delta["reasoning_content"] = rest
            wants_tokens = body.logprobs or body.return_token_ids
            if not any(delta.values()) and not wants_tokens:
                continue
        logprobs = None
        if body.logprobs:
            logprobs = chat_logprobs(body, call, pending, start, len(pending.tokens))
        choice = {
            "index": pending.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason(pending.finish_reason, message),
        }
        if body.return_token_ids:
            choice["token_ids"] = pending.tokens[start:]
        if pending.over:
            choice |= {"stop_reason": pending.stop_reason, "weight_versions": versions(pending)}
        part = {**head, "choices": [choice]}
        if options and options.continuous_usage_stats:
            part["usage"] = call.usage()
        yield part
    if options and options.include_usage:
        yield {**head, "choices": [], "usage": call.usage()}
