"""Chats: the prompt that the template makes, the message that comes back, and its tool calls."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rlhf_http import fields
from rlhf_serve import chats
from rlhf_serve.answers import GenerationParams, NamedModel, PendingCompletion, SampledRequest, TextReader
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf_core.environments import CallParser, ConversationEncoder
from rlhf_core.tokenizer import Encoder, template_text
from tests.plugins.serve.conftest import CHAT
from tests.shared import serving

MESSAGES = [
    {"role": "user", "content": "a b"},
    {"role": "assistant", "content": "c"},
    {"role": "user", "content": "d"},
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def test_a_chat_is_a_completion_of_its_rendered_messages(running: Any) -> None:
    asked = {"model": "policy", "messages": MESSAGES}
    ids = running.post("/tokenize", asked)["tokens"]
    assert running.post("/detokenize", {"model": "policy", "tokens": ids})["prompt"] == "Q a b A c </s> Q d A"
    body = {
        **asked,
        "max_completion_tokens": 12,
        "seed": 3,
        "n": 2,
        "return_token_ids": True,
        "logprobs": True,
    }
    answer = running.post("/v1/chat/completions", {**body, "top_logprobs": 2})
    plain = running.post(
        "/v1/completions",
        {
            "model": "policy",
            "prompt": ids,
            "max_tokens": 12,
            "seed": 3,
            "n": 2,
            "return_token_ids": True,
            "logprobs": 0,
        },
    )
    assert answer["prompt_token_ids"] == ids
    assert answer["usage"] == plain["usage"]
    for one, other in zip(answer["choices"], plain["choices"], strict=True):
        assert one["message"] == {"role": "assistant", "content": other["text"].strip(), "refusal": None}
        assert one["token_ids"] == other["token_ids"]
        content = one["logprobs"]["content"]
        assert [each["logprob"] for each in content] == other["logprobs"]["token_logprobs"]
        assert [bytes(each["bytes"]).decode() for each in content] == [each["token"] for each in content]
        assert all(len(each["top_logprobs"]) == 2 for each in content)
    parts = running.events("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    assert parts[-1]["usage"] == answer["usage"]
    for choice in answer["choices"]:
        own = [p["choices"][0] for p in parts[:-1] if p["choices"][0]["index"] == choice["index"]]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(each["delta"]["content"] for each in own) == choice["message"]["content"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        assert sum(len(each["logprobs"]["content"]) for each in own[1:]) == len(choice["token_ids"])


def test_the_last_message_continued(running: Any) -> None:
    asked = {
        "model": "policy",
        "messages": MESSAGES[:2],
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    ids = running.post("/tokenize", asked)["tokens"]
    assert running.post("/detokenize", {"model": "policy", "tokens": ids})["prompt"] == "Q a b A c"
    running.post("/v1/chat/completions", {**asked, "max_tokens": 2})


def calling(arguments: Any) -> list[Any]:
    """A conversation in which a tool was called, as OpenAI's clients send it."""
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        MESSAGES[0],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "d"},
    ]


@pytest.mark.parametrize(
    ("arguments", "parameters", "written"),
    [
        ('{"a": 2}', '{"type": "object"}', '{"a": 2}'),
        ({"a": 2}, {"type": "object"}, '{"a": 2}'),
        ("", None, "{}"),
        (None, None, "{}"),
    ],
)
def test_the_prompt_has_arguments_as_objects(
    arguments: Any, parameters: Any, written: str, bytewise: Any
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    body = fields.read(
        fields.ChatRequest, json.dumps({"messages": calling(arguments), "tools": [tool]}).encode()
    )
    served = SimpleNamespace(
        encoder=Encoder(bytewise), conversations=ConversationEncoder(bytewise), length=64
    )
    text = bytewise.decode(chats.encode_chat(body, NamedModel("policy", served, None)))  # type: ignore[arg-type]
    assert f'{{"name": "f", "arguments": {written}}}\n</tool_call>' in text
    CallParser(served.conversations, body.tools)


@pytest.fixture(scope="module")
def bytewise() -> Any:
    """A tokenizer with a token for every byte, and the template of the server's models."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate([*alphabet])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    made.chat_template = CHAT
    return made


def answered(tokenizer: Any, reply: str, step: int, **more: Any) -> tuple[dict[str, Any], list[Any]]:
    """The message of a reply, and its streamed parts, of which each has at most `step` tokens."""
    body = fields.read(
        fields.ChatRequest, json.dumps({"messages": MESSAGES, "tools": [TOOL], **more}).encode()
    )
    parser = CallParser(ConversationEncoder(tokenizer), body.tools)
    tools = chats.Calling(parser, True)
    generation = GenerationParams(
        1000, 1.0, 1.0, None, 0.0, 0, stop_ids=(tokenizer.eos_token_id,), end_ids=(tokenizer.eos_token_id,)
    )
    reader = TextReader(tokenizer, [], True)
    pending = PendingCompletion(
        0, np.zeros(1, np.int32), generation, 0, None, reader, lambda _: None, per_token=True
    )
    call = SampledRequest("x", NamedModel("m", None, None), [pending.prompt], 1, [pending])  # type: ignore[arg-type]
    ids = np.array([*tokenizer(reply)["input_ids"], tokenizer.eos_token_id])

    async def feed() -> None:
        for start in range(0, len(ids), step):
            chunk = ids[start : start + step]
            pending.receive(chunk, np.zeros(len(chunk), np.float32), None, "v")
            if start + step < len(ids):  # the last tokens come with the end
                for _ in range(3):
                    await asyncio.sleep(0)
        pending.finish("stop")

    async def stream() -> list[Any]:
        feeding = asyncio.ensure_future(feed())
        parts = [part async for part in chats.chat_stream(body, call, tools)]
        await feeding
        return parts

    parts = [part["choices"][0] for part in asyncio.run(stream())]
    return tools.message(pending), parts


CALL = '<tool_call>\n{"name": "f", "arguments": {"x": [1, "é"]}}\n</tool_call>'


@pytest.mark.parametrize(
    ("reply", "content", "calls"),
    [
        (f"I look.{CALL}", "I look.", 1),
        (f"\n\nI look.{CALL}", "I look.", 1),
        (CALL + CALL, None, 2),
        ("a < b, <tool is no call 😀", "a < b, <tool is no call 😀", 0),
        ("<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", 0),
    ],
)
@pytest.mark.parametrize("step", [1, 7, 500])
def test_tool_calls_whole_and_streamed(
    bytewise: Any, reply: str, content: str | None, calls: int, step: int
) -> None:
    whole, parts = answered(bytewise, reply, step)
    assert whole["content"] == content
    assert len(whole.get("tool_calls", ())) == calls
    said = "".join(each["delta"].get("content", "") for each in parts)
    assert (said.lstrip() if calls else said) == (content or "")
    assert len(parts) > 2 or step == 500 or reply.startswith("<tool_call>")
    streamed = [one for each in parts for one in each["delta"].get("tool_calls", ())]
    assert [one["index"] for one in streamed] == list(range(calls))
    for one in streamed:
        assert one["function"]["name"] == "f"
        assert json.loads(one["function"]["arguments"]) == {"x": [1, "é"]}
    assert parts[-1]["finish_reason"] == ("tool_calls" if calls else "stop")


HARMONY = """
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}<|start|>
{%- if m.tool_calls %}assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>
{{- m.tool_calls[0].function.arguments | tojson }}<|call|>
{%- else %}{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""


@pytest.mark.parametrize("step", [1, 500])
def test_a_thought_in_a_channel_is_no_part_of_the_reply(bytewise: Any, step: int) -> None:
    """gpt-oss: a thought, and then a call, or what it says; Gemma 4, with and without tools, as it is written."""
    tokenizer = copy.deepcopy(bytewise)
    marks = [f"<|{name}|>" for name in ("start", "channel", "message", "end", "call")]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.chat_template = HARMONY
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>"
    for said, content, calls in (
        ("final<|message|>So.", "So.", []),
        ('commentary to=functions.f<|message|>{"x": 1}', None, [{"x": 1}]),
    ):
        whole, parts = answered(tokenizer, thought + said, step)
        assert (whole["content"], whole["reasoning_content"]) == (content, "hm")
        assert [json.loads(one["function"]["arguments"]) for one in whole.get("tool_calls", ())] == calls
        assert "".join(each["delta"].get("content", "") for each in parts) == (content or "")
        assert "".join(each["delta"].get("reasoning_content", "") for each in parts) == "hm"
        assert parts[-1]["finish_reason"] == ("tool_calls" if calls else "stop")
    whole, parts = answered(tokenizer, thought + "final<|message|>So.", step, tools=None)
    assert (whole["content"], whole["reasoning_content"]) == ("So.", "hm")
    assert [each["delta"]["content"] for each in parts if each["delta"].get("content")][-1] == (
        "." if step == 1 else "So."
    )
    gemma = copy.deepcopy(bytewise)
    gemma.add_special_tokens({"additional_special_tokens": ["<|channel>", "<channel|>"]})
    for tools in ([TOOL], None):
        whole, parts = answered(gemma, "<|channel>thought\nhm<channel|>So.", step, tools=tools)
        assert (whole["content"], whole["reasoning_content"]) == ("So.", "hm")
        for name, said in (("content", "So."), ("reasoning_content", "hm")):
            found = [each["delta"][name] for each in parts if each["delta"].get(name)]
            assert found == (list(said) if step == 1 else [said])


def test_a_template_may_be_given(directory: Path, tiny: Any) -> None:
    served = serving.opened(directory / "policy", slots=4, mesh=tiny.one_device(), chat_template="plain")
    tokenizer = served.policy.model.tokenizer
    assert template_text(tokenizer) == template_text(tokenizer, "plain")
