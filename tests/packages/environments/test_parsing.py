"""What a template writes of a call is read back as that call, and nothing that a policy writes raises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_core.environments import CallParser, ConversationEncoder, ToolEnvironment
from rlhf_core.environments.parsing import FORMATS, call_format
from rlhf_core.errors import InputError
from tests.shared import chat_cases as chat

TYPES = {
    "s": "string",
    "n": "number",
    "i": "integer",
    "b": "boolean",
    "o": "object",
    "l": "array",
    "text": "string",
}
TOOLS = [chat.tool(name, **TYPES) for name in ("add", "look_up", "mail.send-2")]
HEAD = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') }}{% if m.tool_calls %}"
HEAD_ALONE = HEAD.replace("(m.content or '')", "(m.content if not m.tool_calls else '')")
TAIL = (
    "{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
EACH = "{% for c in m.tool_calls %}{% set f = c.function %}"
WRITTEN = {
    "hermes": EACH + "\n<tool_call>\n{{ f | tojson }}\n</tool_call>{% endfor %}",
    "granite": "<|tool_call|>[" + EACH + "{{ {'name': f.name, 'arguments': f.arguments} | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}]",
    "mistral": "[TOOL_CALLS] [{% for c in m.tool_calls %}{% set f = c.function %}{{ '{\"name\": \"' + f.name + "
    "'\", \"arguments\": ' }}{{ f.arguments | tojson }}{{ ', \"id\": \"' + c.id + '\"}' }}"
    "{{ ', ' if not loop.last }}{% endfor %}]",
    "mistral, newer": EACH + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}{% endfor %}",
    "coder": EACH + "\n<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}",
    "lfm": "<|tool_call_start|>[" + EACH + "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]<|tool_call_end|>",
    "llama": "{% for c in m.tool_calls %}{{ {'name': c.function.name, 'parameters': c.function.arguments} | tojson }}"
    "{{ '; ' if not loop.last }}{% endfor %}",
    "glm": EACH + "\n<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}",
}  # fmt: skip
"""Templates of the test, each in the style of a family."""
PUBLISHED = (
    "llama3_1", "llama3_2", "nemotron_3_nano", "qwen2_5", "qwen3", "qwen3_5_think",
    "qwen3_instruct_2507",
)  # fmt: skip
ALIKE = ("llama3_1", "nemotron_3_nano", "qwen2_5", "qwen3")
"""They write calls as llama3_2, qwen3_5_think or qwen3_instruct_2507 does."""
ALONE = ("mistral", "llama", "llama3_1", "llama3_2")
"""They write no text beside calls."""
LETTERS = "abZ09 \n\t<>|{}[]()=,;:\"'\\/.éß漢🙂\u0301</tool_call>[TOOL_CALLS]"


def encoder_for(text: str, make_tokenizer: Any) -> ConversationEncoder:
    tokenizer = make_tokenizer(text + "<|im_start|><|im_end|>")
    tokenizer.chat_template = text
    return ConversationEncoder(tokenizer)


def written(name: str) -> str:
    return (HEAD_ALONE if name in ALONE else HEAD) + WRITTEN[name] + TAIL


def parser_of(text: str, make_tokenizer: Any, tools: Any = TOOLS) -> CallParser:
    """Make the parser of a template that writes calls as this text does."""
    newer = "mistral, newer" if "[ARGS]" in text else "mistral"
    names = {
        "<|tool_call_start|>": "lfm",
        "<function=": "coder",
        "[TOOL_CALLS]": newer,
        "<tool": "hermes",
        "": "llama",
    }
    name = next(name for mark, name in names.items() if mark in text)
    return CallParser(encoder_for(written(name), make_tokenizer), tools)


def random_string(draw: np.random.Generator) -> str:
    return "".join(LETTERS[i] for i in draw.integers(0, len(LETTERS), draw.integers(0, 15)))


def random_value(draw: np.random.Generator, kind: str, depth: int = 0) -> Any:
    if kind == "object":
        kinds = [list(TYPES.values())[i] for i in draw.integers(0, len(TYPES), draw.integers(0, 3 - depth))]
        return {random_string(draw): random_value(draw, kind, depth + 1) for kind in kinds}
    if kind == "array":
        kinds = [list(TYPES.values())[i] for i in draw.integers(0, len(TYPES), draw.integers(0, 3 - depth))]
        return [random_value(draw, kind, depth + 1) for kind in kinds]
    if kind == "boolean":
        return bool(draw.integers(2))
    if kind == "integer":
        return int(draw.integers(-(10**9), 10**9)) * 10 ** int(draw.integers(0, 12))
    return (
        float(draw.normal()) * 10.0 ** int(draw.integers(-9, 9)) if kind == "number" else random_string(draw)
    )


def random_calls(draw: np.random.Generator, most: int) -> list[dict[str, Any]]:
    calls = []
    for number in range(draw.integers(1, most + 1)):
        keys = [key for key in TYPES if draw.random() < 0.5]
        function = {
            "name": str(draw.choice(["add", "look_up"])),
            "arguments": {key: random_value(draw, TYPES[key]) for key in keys},
        }
        calls.append({"id": f"{number:09d}", "type": "function", "function": function})
    return calls


def rendered(encoder: ConversationEncoder, calls: Any, content: str) -> str:
    """What the policy would have written: from its generation prompt to the token that ends the reply."""
    asked = {"role": "user", "content": "a"}
    reply = {"role": "assistant", "content": content, "tool_calls": calls}
    opened = encoder.write([asked], TOOLS, open_turn=True)
    text = encoder.write(encoder.with_call_ids([asked, reply]), TOOLS)
    assert text.startswith(opened)
    text = text[len(opened) :].rstrip("\n")
    end = next(stop for stop in encoder.stops.values() if text.endswith(stop))
    return text.removesuffix(end)


def plainly(message: dict[str, Any]) -> list[Any]:
    assert "call_errors" not in message, message
    return [[call["function"]["name"], call["function"]["arguments"]] for call in message["tool_calls"]]


def round_trips(encoder: ConversationEncoder, count: int, *, most: int = 3, content: str = "so:") -> None:
    opened = encoder.write([{"role": "user", "content": "a"}], open_turn=True)
    parser = CallParser(encoder, TOOLS)
    for seed in range(count):
        calls = random_calls(np.random.default_rng(seed), most)
        text = rendered(encoder, calls, content)
        ids = encoder.tokenizer(text, add_special_tokens=False)["input_ids"]
        for message in (parser.parse(text), parser.message([*ids, encoder.stop_ids[-1]])):
            assert plainly(message) == [list(call["function"].values()) for call in calls], text
            begun = "<think>\n" if opened.endswith("<think>\n") else ""
            assert message["content"] == content.removeprefix(begun), text


@pytest.mark.parametrize("name", WRITTEN)
def test_a_template_that_writes_a_known_format_round_trips(name: str, make_tokenizer: Any) -> None:
    encoder = encoder_for(written(name), make_tokenizer)
    form = call_format(encoder)
    assert form is not None
    assert form.alone == (name in ALONE)
    round_trips(encoder, 150, content="" if name in ALONE else "so:")


@pytest.mark.data
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in ALIKE else name for name in PUBLISHED]
)
def test_published_templates_round_trip(name: str, published: dict[str, Path], make_tokenizer: Any) -> None:
    encoder = encoder_for(published[name].read_text(), make_tokenizer)
    alone = name in ALONE
    thinks = name in ("nemotron_3_nano", "qwen3", "qwen3_5_think")
    content = "" if alone else "<think>\nhm\n</think>\n\nso:" if thinks else "so:"
    round_trips(encoder, 150, most=1 if alone else 3, content=content)


def test_a_format_that_is_not_known_is_refused(make_tokenizer: Any) -> None:
    encoder = encoder_for(HEAD + EACH + "<<{{ f | tojson }}>>{% endfor %}" + TAIL, make_tokenizer)
    with pytest.raises(InputError, match=r"an unknown format, '<<\{"):
        CallParser(encoder, TOOLS)
    assert CallParser(encoder).message([]) == {"role": "assistant", "content": ""}


@pytest.mark.data
def test_templates_without_calls_have_no_format(published: dict[str, Path], make_tokenizer: Any) -> None:
    for name in set(published) - set(PUBLISHED) - {"deepseekv3"}:
        assert call_format(encoder_for(published[name].read_text(), make_tokenizer)) is None, name


@pytest.mark.data
def test_a_template_that_leaves_calls_to_the_policy(published: dict[str, Path], make_tokenizer: Any) -> None:
    """LFM 2's; its tokenizer has the marks of calls, which are read with or without them in the template."""
    text = published["lfm2"].read_text()
    tokenizer = make_tokenizer(f"{text}<|tool_call_start|><|tool_call_end|>")
    tokenizer.chat_template = text
    parser = CallParser(ConversationEncoder(tokenizer), TOOLS)
    ids = tokenizer.encode(
        "<|tool_call_start|>[add(i=1)]<|tool_call_end|>so<|im_end|>", add_special_tokens=False
    )
    message = parser.message(ids)
    assert plainly(message) == ADD
    assert message["content"] == "so"


ADD = [["add", {"i": 1}]]


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ('hm <tool_call>{"name": "add", "arguments": {"i": 1}}</tool_call> so', ADD, "hm  so"),
        ("<tool_call>\n<function=add>\n<parameter=i>\n1\n</parameter>\n</function>\n</tool_call>", ADD, ""),
        ('[TOOL_CALLS]add[ARGS]{"i": 1}', ADD, ""),
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"i": 1}, "id": "abcdefghi"}]', ADD, ""),
        ("so <|tool_call_start|>[add(i=1), add(i=1)]<|tool_call_end|>", ADD * 2, "so"),
        ("<|tool_call_start|>add(b=None, o={'x': [true, -1.5]})<|tool_call_end|>",
         [["add", {"b": None, "o": {"x": [True, -1.5]}}]], ""),
        ('{"name": "add", "parameters": {"i": 1}}', ADD, ""),
        ('<|python_tag|>{"name": "add", "parameters": {"i": 1}}; {"name": "add", "parameters": {"i": 1}}', ADD * 2, ""),
        ('{"name": "add", "arguments": "{\\"i\\": 1}"}', ADD, ""),
        ('<think>{"name": "add"} <tool_call>x</tool_call></think><tool_call>{"name": "add"}</tool_call>',
         [["add", {}]], '<think>{"name": "add"} <tool_call>x</tool_call></think>'),
    ],
)  # fmt: skip
def test_calls_of_all_formats(text: str, calls: Any, content: str, make_tokenizer: Any) -> None:
    message = parser_of(text, make_tokenizer).parse(text)
    assert plainly(message) == calls
    assert message["content"] == content


@pytest.mark.parametrize(
    "text",
    ["", "42", '{"name": "Ann", "age": 3}', '{"answer": 1}', "[1, 2]", "add(i=1)", "<think><tool_call>{}</tool_call>",
     "<tool_call", "{", "<|python_tag"],
)  # fmt: skip
def test_texts_without_calls(text: str, make_tokenizer: Any) -> None:
    message = parser_of(text, make_tokenizer).parse(text)
    assert message == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string", "nullable": True}, "None", None),
        ({"type": "integer"}, "12", 12),
        ({"type": "integer"}, "twelve", "twelve"),
        ({"type": "boolean"}, "True", True),
        ({"type": "array", "items": {"type": "string", "enum": ["a"]}}, '["a"]', ["a"]),
        ({"type": ["integer", "string"]}, "12", 12),
        ({}, "a b", "a b"),
    ],
)
def test_values_without_quotes_are_read_by_their_schema(
    schema: Any, written: str, value: Any, make_tokenizer: Any
) -> None:
    tool = {"function": {"name": "add", "parameters": {"properties": {"x": schema}}}}
    text = f"<tool_call>\n<function=add>\n<parameter=x>\n{written}\n</parameter>\n</function>\n</tool_call>"
    assert plainly(parser_of(text, make_tokenizer, [tool]).parse(text)) == [["add", {"x": value}]]


def test_ids_that_the_policy_wrote_and_good_calls_beside_malformed_ones_are_kept(make_tokenizer: Any) -> None:
    parser = CallParser(encoder_for(written("mistral"), make_tokenizer), TOOLS)
    message = parser.parse('[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "abcdefghi"}]')
    assert message["tool_calls"][0]["id"] == "abcdefghi"

    good, bad = '<tool_call>{"name": "add", "arguments": {"i": 1}}</tool_call>', "<tool_call>{</tool_call>"
    message = CallParser(encoder_for(written("hermes"), make_tokenizer), TOOLS).parse(
        f"{good}\n{bad}\n{good}"
    )
    assert len(message["tool_calls"]) == 2
    assert len(message["call_errors"]) == 1


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<tool_call>{'name': 'add'}</tool_call>",
         "the call is not JSON: Expecting property name enclosed in double quotes at character 2 of it"),
        ('<tool_call>{"name": "add"', "the call is not JSON: Expecting ',' delimiter at character 15 of it"),
        ('<tool_call>{"name": "add"}', "the call does not end with </tool_call>"),
        ("<tool_call>[]</tool_call>", 'the call is not an object such as {"name": …, "arguments": {…}}'),
        ('<tool_call>{"arguments": {}}</tool_call>', 'the call has no function "name"'),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
         "the call's arguments are not an object such as {}"),
        ('<tool_call>{"name": "add", "arguments": {"n": NaN}}</tool_call>',
         "the call is not JSON: NaN is no JSON number"),
        ('<tool_call>{"name": "add", "arguments": {"s": "\\ud800"}}</tool_call>',
         "the call is not valid Unicode: \\ud800 at character 16 is an unpaired surrogate; remove it"),
        ("<tool_call>" + "[" * 99999, "the call is not JSON: it is nested too deeply"),
        ("<tool_call>\n<function=add>\n<parameter=i>\n1\n</function>\n</tool_call>",
         "the parameter 'i>\\n1\\n</function>\\n</tool_call>' does not end with </parameter>"),
        ("<|tool_call_start|>[add(i=1)]", "the call does not end with <|tool_call_end|>"),
        ("<|tool_call_start|>[add(1)]<|tool_call_end|>", "the call's arguments need their names"),
        ("<|tool_call_start|>[add(i=f())]<|tool_call_end|>", "the call is not written as [name(key=value)]: malformed"),
        ("<|tool_call_start|>add<|tool_call_end|>", "the call is not written as [name(key=value)]"),
        ("[TOOL_CALLS]add[ARGS]{", "the call is not JSON: Expecting property name enclosed in double quotes at "
         "character 2 of it"),
        ('{"name": "add", "parameters": {"i": 1}',
         "the call is not JSON: Expecting ',' delimiter at character 39 of it"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_call(text: str, error: str, make_tokenizer: Any) -> None:
    message = parser_of(text, make_tokenizer).parse(text)
    assert "tool_calls" not in message
    assert message["call_errors"][0].startswith(error), message


def test_a_call_stands_alone_where_the_template_drops_the_text_beside_it(make_tokenizer: Any) -> None:
    call = '[TOOL_CALLS][{"name": "add", "arguments": {"i": 1}}]'
    parser = CallParser(encoder_for(written("mistral"), make_tokenizer), TOOLS)
    assert plainly(parser.parse(call)) == ADD
    for text in (f"so: {call}", f"<think>hm</think>{call}", f"{call} so"):
        message = parser.parse(text)
        assert message["call_errors"] == ["a call must be the whole reply: the text around it would be lost"]
        assert "tool_calls" not in message


def look_up(s: str) -> str:
    """Look up.

    Args:
        s: A word.
    """
    return s


SCRAPS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", "{", "}", "[", "]", '"', "\\",
    "\\u", "\\ud800", "NaN", "1e999", "9" * 5000, "(" * 300, "[" * 3000, "\0", "\ud800", "<parameter=", "</function>",
    "\n", "=", "f(", "<|python_tag|>", ";", "name", "lambda:0", "'''", "0x", "1_0", "\U0010ffff"]  # fmt: skip


def mutated(draw: np.random.Generator, text: str) -> str:
    for _ in range(draw.integers(1, 6)):
        a, b = sorted(draw.integers(0, len(text) + 1, 2).tolist())
        scrap = SCRAPS[draw.integers(len(SCRAPS))]
        text = [text[:a] + text[b:], text[:a] + scrap + text[a:], text[:a] + scrap + text[b:], text[:b], text[a:],
                text[:b] + text[a:]][draw.integers(6)]  # fmt: skip
    return text


@pytest.mark.parametrize("name", WRITTEN)
def test_no_text_raises(name: str, make_tokenizer: Any) -> None:
    encoder = encoder_for(written(name), make_tokenizer)
    parser, environment = CallParser(encoder, TOOLS), ToolEnvironment([look_up])
    draw = np.random.default_rng(len(name))
    calls = 0
    for _ in range(250):
        text = mutated(draw, rendered(encoder, random_calls(draw, 2), "so"))
        message = parser.parse(text)
        assert isinstance(message["content"], str)
        for call in message.get("tool_calls", ()):
            json.dumps(call, ensure_ascii=False, allow_nan=False).encode()
            assert call["function"]["name"].strip()
            calls += 1
        for error in message.get("call_errors", ()):
            assert error
            assert "\n" not in error
            error.encode()
        for answer in environment.step(message).messages:
            json.dumps(answer, ensure_ascii=False).encode()
    assert calls


def test_no_ids_raise(make_tokenizer: Any) -> None:
    encoder = encoder_for(written("mistral, newer"), make_tokenizer)
    parser, draw = CallParser(encoder, TOOLS), np.random.default_rng(0)
    for _ in range(500):
        ids = draw.integers(0, len(encoder.tokenizer), draw.integers(0, 40)).astype(np.int32)
        assert parser.message(ids)["role"] == "assistant"


CALLS = {
    0: '<tool_call>{"name": "add", "arguments": {"i": 12}}</tool_call>',
    1: "<tool_call>\n<function=add>\n<parameter=i>\n12\n</parameter>\n</function>\n</tool_call>",
    2: '[TOOL_CALLS]add[ARGS]{"i": 12}',
    3: '[TOOL_CALLS][{"name": "add", "arguments": {"i": 12}}]',
    4: "<tool_call>add\n<arg_key>i</arg_key>\n<arg_value>12</arg_value>\n</tool_call>",
    6: '<|tool_call|>[{"name": "add", "arguments": {"i": 12}}]',
    7: "<|tool_call_start|>[add(i=12)]<|tool_call_end|>",
    8: "<|tool_call>call:add{i:12}<tool_call|>",
}
"""{index in FORMATS: a call}"""


@pytest.mark.parametrize("number", CALLS)
def test_a_call_in_a_code_block_or_one_that_is_cut_is_none(number: int, make_tokenizer: Any) -> None:
    call, parser = CALLS[number], CallParser(encoder_for(written("hermes"), make_tokenizer), TOOLS)
    parser.format = FORMATS[number]

    def found(text: str) -> list[Any]:
        return [each["function"]["arguments"] for each in parser.parse(text).get("tool_calls", ())]

    assert found(call) == found(f"So:\n```\ncode\n```\n{call}") == [{"i": 12}]
    assert found(f"For example:\n```\n{call}\n```\nThat is all.") == []
    assert found(f"For example:\n```xml\n{call}\n{call}\n```\n{call}") == [{"i": 12}]
    assert found(f"```\n{call}") == [{"i": 12}]  # the block never ends
    assert not any(found(call[:n]) for n in range(len(call)))
