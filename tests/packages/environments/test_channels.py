"""Replies with channels: gpt-oss's harmony format, and Gemma 4's thoughts, calls and results in one turn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlhf_core import data
from rlhf_core.environments import CallParser, ConversationEncoder
from rlhf_core.sampling import Rollouts
from tests.shared import chat_cases as chat
from tests.shared import collectors

TOOL = chat.tool("add", "Add.", s="string")
HARMONY = """
{%- if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if not (loop.previtem.tool_calls or loop.previtem.role == 'tool') %}{{ raise_exception('no call') }}{% endif -%}
<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary<|message|>
{{- m.content | tojson }}<|end|>
{%- elif m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>
{%- elif m.tool_calls %}
{%- if m.content or m.thinking %}<|start|>assistant<|channel|>analysis<|message|>
{{- m.content or m.thinking }}<|end|>{% endif -%}
<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>
{{- m.tool_calls[0].function.arguments | tojson }}<|call|>
{%- else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
GEMMA4 = """
{%- macro written(x) -%}
{%- if x is string -%}<|"|>{{ x }}<|"|>
{%- elif x is boolean -%}{{ 'true' if x else 'false' }}
{%- elif x is mapping -%}{{ '{' }}
{%- for k, v in x | dictsort -%}{{ ',' if not loop.first }}{{ k }}:{{ written(v) }}{%- endfor -%}{{ '}' }}
{%- elif x is iterable -%}[{%- for v in x -%}{{ ',' if not loop.first }}{{ written(v) }}{%- endfor -%}]
{%- else -%}{{ x }}
{%- endif -%}
{%- endmacro -%}
{%- if tools -%}<|turn>system\n
{%- for t in tools -%}<|tool>{{ written(t.function) }}<tool|>{%- endfor -%}<turn|>\n
{%- endif -%}
{%- set ns = namespace(last='') -%}
{%- for m in messages -%}
{%- if m.role != 'tool' -%}
{%- if not (m.role == 'assistant' and ns.last == 'results') -%}
<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n
{%- endif -%}
{%- set ns.last = 'calls' if m.tool_calls else '' -%}
{%- for c in m.tool_calls or [] -%}
<|tool_call>call:{{ c.function.name }}{{ written(c.function.arguments) }}<tool_call|>
{%- endfor -%}
{%- if m.tool_calls -%}
{%- for r in messages[loop.index:] -%}
{%- if r.role != 'tool' -%}{%- break -%}{%- endif -%}
<|tool_response>response:{{ r.name }}{value:{{ written(r.content) }}}<tool_response|>{%- set ns.last = 'results' -%}
{%- endfor -%}
{%- endif -%}
{{- m.content -}}
{%- if ns.last == 'calls' -%}<|tool_response>
{%- elif ns.last == '' or m.content -%}<turn|>\n
{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and ns.last == '' -%}<|turn>model\n{%- endif -%}"""
GEMMA4 = GEMMA4.replace("\\n", "{{ '\\n' }}")
MARKS = {
    HARMONY: (("<|return|>", "<|call|>"), ("<|constrain|>",)),
    GEMMA4: (
        ("<turn|>", "<|tool_response>"),
        ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
}
"""The stop tokens of a template's models, and other special tokens."""


def encoder_of(template: str, make_tokenizer: Any) -> ConversationEncoder:
    stops, marks = MARKS[template]
    tokenizer = make_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": [*stops, *marks]})
    tokenizer.chat_template = template
    return ConversationEncoder(tokenizer, None, tokenizer.convert_tokens_to_ids(stops))


def calls_of(message: dict[str, Any]) -> list[Any]:
    return [list(call["function"].values()) for call in message.get("tool_calls", ())]


ADD = [["add", {"s": "a"}]]
SAID = "<|channel|>analysis<|message|>hm to=functions.no<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("template", "text", "expected"),
    [
        (HARMONY, SAID + '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"s": "a"}<|call|>',
         {"content": "", "thinking": "hm to=functions.no", "calls": ADD}),
        (HARMONY, ' to=functions.add<|channel|>commentary json<|message|>{"s": "a"}', {"content": "", "calls": ADD}),
        (HARMONY, SAID + "<|channel|>commentary<|message|>I add.<|end|><|start|>assistant<|channel|>commentary "
         'to=functions.add<|message|>{"s": "a"}<|call|>', {"content": "I add.", "calls": ADD}),
        (HARMONY, SAID + "<|channel|>final<|message|>3<|return|>", {"content": "3", "thinking": "hm to=functions.no"}),
        (HARMONY, "<|channel|>analysis<|message|>cut", {"content": "", "thinking": "cut"}),
        (HARMONY, "no marks", {"content": "no marks"}),
        (HARMONY, '<|channel|>commentary to=functions.add<|message|>{"s"<|call|>',
         {"content": "", "error": "the call's arguments are not JSON"}),
        (GEMMA4, "<|channel>thought\nhm <|tool_call>call:no{}<tool_call|><channel|>So: "
         '<|tool_call>call:add{s:<|"|>a<|"|>}<tool_call|><|tool_call>call:add{}<tool_call|><|tool_response>',
         {"content": "So:", "reasoning_content": "hm call:no{}", "calls": [*ADD, ["add", {}]]}),
        (GEMMA4, '<|tool_call>call:add{s:<|"|>a, "b" {:}<|"|>,n:-1.5e-3, l:[1,true,null,[]],o:{<|"|>k<|"|>:{b:False}}}'
         "<tool_call|>", {"content": "", "calls": [["add", {"s": 'a, "b" {:}', "n": -0.0015, "l": [1, True, None, []],
                                                           "o": {"k": {"b": False}}}]]}),
        (GEMMA4, "3<turn|>", {"content": "3"}),
        *((GEMMA4, f"<|tool_call>call:{wrong}<tool_call|>", {"content": "", "error": "the call is not written as"})
          for wrong in ("add{s:}", 'add{s:<|"|>a}', "add{s:1", "add", "{}", "add{" + "[" * 9999)),
    ],
)  # fmt: skip
def test_replies(template: str, text: str, expected: dict[str, Any], make_tokenizer: Any) -> None:
    encoder = encoder_of(template, make_tokenizer)
    parser, ids = CallParser(encoder, [TOOL]), encoder.tokenizer.encode(text, add_special_tokens=False)
    message = parser.message(ids)
    for count in range(min(len(ids), 200)):  # what is said of a part of it stays true
        content, thought = parser.so_far(ids[:count])
        assert message["content"].startswith(content.strip())
        assert (message.get("reasoning_content") or message.get("thinking") or "").startswith(thought)
    error = expected.get("error")
    assert [each[: len(error or "")] for each in message.get("call_errors", ())] == ([error] if error else [])
    assert calls_of(message) == expected.get("calls", [])
    for name in ("content", "thinking", "reasoning_content"):
        assert message.get(name) == expected.get(name)


@pytest.mark.parametrize("template", [HARMONY, GEMMA4], ids=["harmony", "gemma4"])
def test_what_the_template_writes_is_read_back(template: str, make_tokenizer: Any) -> None:
    encoder = encoder_of(template, make_tokenizer)
    parser, draw, asked = (
        CallParser(encoder, [TOOL]),
        np.random.default_rng(0),
        {"role": "user", "content": "a"},
    )
    texts = ["", "<", '"', "{a:1}", "é漢\n", "[,]", "to=functions.f", "true", "1"]
    for _ in range(50):
        some = [texts[i] for i in draw.integers(0, len(texts), 4)]
        arguments = {"b": bool(draw.integers(2)), "n": int(draw.integers(-9, 9)), "x": float(draw.normal())}
        arguments |= {"s": some[0], "l": [some[1], [draw.normal() * 1e-9], []], "o": {"k": {"m": some[2:]}}}
        function = {"name": "add", "arguments": arguments}
        reply = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        }
        opened = encoder.write([asked], [TOOL], open_turn=True)
        text = encoder.write(encoder.with_call_ids([asked, reply]), [TOOL]).removeprefix(opened)
        ids = encoder.tokenizer.encode(text, add_special_tokens=False)
        assert calls_of(parser.message(ids)) == [["add", arguments]]


@pytest.mark.parametrize(
    ("template", "said", "expected"),
    [
        (HARMONY, SAID + "<|channel|>final<|message|>3<|return|>", {"content": "3", "thinking": "hm to=functions.no"}),
        (GEMMA4, "<|channel>thought\nhm<channel|>3<turn|>", {"content": "3", "reasoning_content": "hm"}),
        (GEMMA4, "<think>hm</think>3<turn|>", {"content": "<think>hm</think>3"}),  # written as text
    ],
)  # fmt: skip
def test_rewards_get_the_final_text(
    template: str, said: str, expected: dict[str, str], make_tokenizer: Any
) -> None:
    """A completion of the prompts of a dataset is read as an episode's reply is; one of a text prompt stays text."""
    tokenizer = encoder_of(template, make_tokenizer).tokenizer
    tokens = np.array([tokenizer.encode(said, add_special_tokens=False)], np.int32)
    samples = Rollouts(
        tokens, np.array([tokens.size], np.int32), np.zeros(tokens.shape, np.float32), np.ones(1, bool)
    )
    stops = tokenizer.convert_tokens_to_ids(MARKS[template][0])
    thought = expected.get("reasoning_content") or expected.get("thinking") or ""
    parser = CallParser(ConversationEncoder(tokenizer, stop_ids=stops))
    assert parser.so_far(tokens[0, :-1]) == (expected["content"], thought)
    for prompt in ("a", [{"role": "user", "content": "a"}]):
        prompts = data.encode_prompts(data.load([{"prompt": prompt}]), tokenizer, max_prompt_length=64)
        (read,) = collectors.scored(prompts, [0], samples, tokenizer, stops=stops).inputs.completions
        if isinstance(prompt, str):
            assert isinstance(read, str)
            assert read.endswith("3")
        else:
            assert read == [{"role": "assistant", **expected}]


@pytest.mark.parametrize(
    ("template", "ending", "result"),
    [
        (
            HARMONY,
            "<|call|>",
            '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"3"<|end|>',
        ),
        (GEMMA4, "<|tool_response>", 'response:add{value:<|"|>3<|"|>}<tool_response|>'),
    ],
    ids=["harmony", "gemma4"],
)
def test_what_follows_a_call(template: str, ending: str, result: str, make_tokenizer: Any) -> None:
    """Also of a call that could not be read, of one that was cut, and of one with a text before it."""
    encoder = encoder_of(template, make_tokenizer)
    assert encoder.problem(tools=[TOOL], roles=["tool"]) is None
    call = {"type": "function", "function": {"name": "add", "arguments": {"s": "a"}}}
    answer, stop = (
        {"role": "tool", "name": "add", "content": "3"},
        encoder.tokenizer.convert_tokens_to_ids(ending),
    )
    opening = "<|start|>assistant" if template == HARMONY else ""
    for more in ({"tool_calls": [call]}, {"content": "So:", "tool_calls": [call]}, {"call_errors": ["no"]}):
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", **more}]
        for ended_by, before in ((stop, ""), (None, ending)):
            found = encoder.observation(messages, [answer], ended_by=ended_by, tools=[TOOL])
            assert encoder.tokenizer.decode(found) == before + result + opening
