"""Learned tokens of conversations are those of replies, checked against the text; reports name the exceptions."""

from __future__ import annotations

import copy
import dataclasses
from types import ModuleType

import pytest
from tokenizers import pre_tokenizers

from rlhf_core import data
from rlhf_core.errors import InputError
from rlhf_core.tokenizer import PLAIN, Encoder
from tests.shared import chat_cases as chat

CASES = chat.cases()
HEADERS = {
    None: "assistant:\n",
    chat.CHATML: "<|im_start|>assistant\n",
    chat.LLAMA3: "<|head|>assistant<|/head|>\n\n",
    chat.LLAMA2: "[/INST]",
    chat.STRIPS: "assistant:",
    chat.GEMMA: "<start_of_turn>model\n",
    chat.PHI: "<|assistant|>\n",
    chat.TOOLS: "<|im_start|>assistant\n",
    chat.MARKS: "<|im_start|>assistant\n",
    chat.MARKS_CONTENT: "<|im_start|>assistant\n",
}
"""Text before each reply, which ends with the first stop token after it."""
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = {chr(b): b for b in PRINTABLE} | {
    chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in PRINTABLE)
}
assert set(BYTES) == set(pre_tokenizers.ByteLevel.alphabet())


def token_spans(tokenizer, ids, text):
    """Find the bytes of `text` that every token covers, by laying the tokens end to end."""
    added = tokenizer.get_added_vocab()
    pieces, at, spans = tokenizer.convert_ids_to_tokens(ids), 0, []
    by_bytes = "Ġ" in tokenizer.get_vocab()
    for i, piece in enumerate(pieces):
        if piece in added:
            size = len(piece.encode()) * text.encode().startswith(
                piece.encode(), at
            )  # otherwise not part of the text
        elif by_bytes:
            size = len(bytes(BYTES[c] for c in piece))
        else:
            size = 1 if piece.startswith("<0x") else len(piece.replace("▁", " ").encode())
            size -= i == 0 or pieces[i - 1] in added  # the space added before a text
        spans.append((at, at + size))
        at += size
    assert at > len(text.encode()) - 20  # white space and a second stop token after the first are cut
    return spans


def learned_bytes(case, text):
    """Mask every reply up to its stop token, without its header."""
    spans, at, header = [], 0, HEADERS[case.template]
    while (start := text.find(header, at)) >= 0:
        found = [(text.index(stop, start), stop) for stop in case.stops if stop in text[start:]]
        end, stop = min(found or [(text.find("\n\nuser:", start) % (len(text) + 1), "")])
        at = end + len(stop)
        spans.append(tuple(len(text[:i].encode()) for i in (start + len(header), at)))
    return spans


def expected(case, turns, first=0):
    text = case.tokenizer.apply_chat_template(
        turns, chat_template=case.template or PLAIN, tools=case.tools, tokenize=False
    )
    ids = Encoder(case.tokenizer, None if case.template else "plain").whole([None], [turns], [case.tools])[0]
    spans = learned_bytes(case, text)[first:]
    mask = [
        any(a < end and start < b for a, b in spans) for start, end in token_spans(case.tokenizer, ids, text)
    ]
    if not text.rstrip().endswith(tuple(case.stops)) and case.stops:
        mask[-1] = True  # an appended EOS
    return ids.tolist(), mask


def texts(case, row, **options):
    row = {**row, **({"tools": case.tools} if case.tools else {})}
    options = {"max_length": None, "chat_template": None if case.template else "plain", **options}
    return data.encode_texts(data.load([row]), case.tokenizer, **options)


TURNS = [*chat.ASKED, chat.assistant(chat.REPLY), chat.user("ab"), chat.assistant("é in  \n\n  ab")]
FOLLOWED = [name for name, case in CASES.items() if case.template in HEADERS]


def read(encoded):
    """Return the tokens of the only text, and their weights."""
    (tokens,) = encoded.sequences["tokens"]
    return tokens.tolist(), encoded.weights(0)[0].tolist()


def learned(case, encoded):
    """Decode the learned tokens of the first text."""
    return case.tokenizer.decode(encoded.sequences["tokens"][0][encoded.learned[0]])


@pytest.mark.parametrize("name", FOLLOWED)
def test_every_reply_is_learned_and_nothing_else(name):
    case = CASES[name]
    turns = [chat.SYSTEM, *TURNS] if case.prompt[0]["role"] == "system" else TURNS
    ids, mask = expected(case, turns)
    encoded = texts(case, {"messages": turns})
    assert encoded.sequences["tokens"][0].tolist() == ids
    assert encoded.weights(0)[0].tolist() == mask
    assert sum(mask) > 20
    report = encoded.report
    assert report.unlearned == report.unlike == report.left_out == []
    # A tokenizer without offsets gives nearly the same: a merge across a boundary counts as a whole.
    slow = dataclasses.replace(case, tokenizer=Slow(case.tokenizer))
    other = texts(slow, {"messages": turns})
    assert other.sequences["tokens"][0].tolist() == ids
    assert (other.weights(0)[0] != mask).sum() <= 2


@pytest.mark.parametrize("name", FOLLOWED)
def test_of_prompt_and_completion_only_the_completion_is_learned(name):
    case = CASES[name]
    ids, mask = expected(case, TURNS, first=1)
    for completion in (TURNS[3:], [*TURNS[3:], chat.user("b")]):
        assert read(texts(case, {"prompt": TURNS[:3], "completion": completion})) == (ids, mask)


class Slow:
    """A slow tokenizer, written in Python."""

    def __init__(self, tokenizer):
        self.own = tokenizer
        self.is_fast = False

    def __getattr__(self, name):
        return getattr(self.own, name)

    def __len__(self):
        return len(self.own)

    def __call__(self, text, return_offsets_mapping=False, **options):
        assert not return_offsets_mapping
        return self.own(text, **options)


CALLS = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{% set f = c.function or c %}"


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ('{"a": [2, "é"]}', '{"a": [2, "é"]}'),
        ({"a": [2, "é"]}, '{"a": [2, "é"]}'),
        ("", "{}"),
        (" ", "{}"),
        (None, "{}"),
    ],
)
@pytest.mark.parametrize("call", [lambda function: {"function": function}, lambda function: function])
@pytest.mark.parametrize(
    "write",
    [
        "{{ f.arguments | tojson }}",
        "{% for k, v in f.arguments.items() %}{{ loop.first and '{' or '' }}{{ k | tojson }}: {{ v | tojson }}}"
        "{% else %}{}{% endfor %}",
        "{{ '' + f.arguments }}",  # DeepSeek's takes nothing but text
        "{{ f.arguments }}",
    ],
)
def test_arguments_of_calls_may_be_json_text(write, call, arguments, written):
    tokenizer = copy.copy(CASES["tools"].tokenizer)
    tokenizer.chat_template = f"{CALLS}<{write}>{{% endfor %}}{{% endfor %}}"
    function = {"name": "f", "arguments": arguments}
    made = call(function)
    turns = [chat.user("ab"), {"role": "assistant", "content": "", "tool_calls": [made]}]
    template = Encoder(tokenizer).chat
    assert template.write(turns) == f"ab<{written}>"
    assert function["arguments"] == arguments  # as it was


@pytest.mark.parametrize("parameters", [{"properties": {}}, '{"properties": {}}'])
def test_parameters_of_tools_may_be_json_text(parameters):
    tokenizer = copy.copy(CASES["tools"].tokenizer)
    tokenizer.chat_template = "{{ tools[0].function.parameters | tojson }}"
    tools = [{"function": {"name": "f", "parameters": parameters}}]
    assert Encoder(tokenizer).chat.write([chat.user("a")], tools=tools) == '{"properties": {}}'


def test_what_tools_answer_is_not_learned():
    case = CASES["tools"]
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
    turns = [chat.user("ab?"), call, {"role": "tool", "content": "a result"}, chat.assistant("in")]
    for row in ({"messages": turns}, {"prompt": turns[:1], "completion": turns[1:]}):
        encoded = texts(case, row)
        assert read(encoded) == expected(case, turns)
        assert (
            learned(case, encoded)
            == '<call>{"name": "f", "arguments": {"x": 1}}</call><|im_end|>in<|im_end|>'
        )


def test_thoughts_that_a_template_forgets_are_not_learned_by_the_way():
    """Earlier replies would be learned without their thoughts, so they are not learned."""
    case = CASES["forgets"]
    turns = [
        chat.user("a"),
        chat.assistant("<think>in</think>ab"),
        chat.user("b"),
        chat.assistant("<think>b</think>a"),
    ]
    encoded = texts(case, {"messages": turns})
    assert learned(case, encoded) == "<think>b</think>a<|im_end|>"
    assert "in</think>" not in case.tokenizer.decode(encoded.sequences["tokens"][0])
    assert encoded.report.unlearned == encoded.report.left_out == ["dataset row 1"]
    assert "1 whose earlier replies are not all learned (dataset row 1)" in str(encoded.report)
    assert not encoded.report.all_as_given
    # A reply without a thought is rendered the same either way, so it is learned.
    turns[1] = chat.assistant("ab")
    encoded = texts(case, {"messages": turns})
    assert learned(case, encoded) == ("ab<|im_end|><think>b</think>a<|im_end|>")
    assert encoded.report.all_as_given


def test_a_generation_prompt_that_replies_do_not_follow_is_reported():
    case = CASES["thinks"]
    encoded = texts(case, {"messages": chat.ASKED[:2]})
    assert encoded.report.unlike == ["dataset row 1"]
    assert learned(case, encoded) == " ab ab\n<|im_end|>"
    row = {"messages": [chat.ASKED[0], chat.assistant("<think>\nin</think>b")]}
    encoded = texts(case, row)
    assert encoded.report.all_as_given
    assert learned(case, encoded) == "in</think>b<|im_end|>"


def test_messages_and_tools_that_a_template_leaves_out_are_reported():
    silent = "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    case = dataclasses.replace(CASES["chatml"], template=silent)
    case.tokenizer.chat_template, before = silent, case.tokenizer.chat_template
    try:
        tools = {"tools": CASES["tools"].tools}
        for row, told in (
            ({"messages": chat.ASKED[:2]}, []),
            ({"messages": [chat.SYSTEM, *chat.ASKED[:2]]}, ["dataset row 1"]),
            ({"messages": chat.ASKED[:2], **tools}, ["dataset row 1"]),
        ):
            assert texts(case, row).report.left_out == told
            row = {
                "chosen": row["messages"],
                "rejected": [*row["messages"][:-1], chat.assistant("b")],
                **{k: row[k] for k in row if k == "tools"},
            }
            pairs = data.encode_pairs(data.load([row]), case.tokenizer, max_length=None)
            assert pairs.report.left_out == told
            row = {**row, "prompt": row.pop("chosen")[:-1]}
            prompts = data.encode_prompts(data.load([row]), case.tokenizer, max_prompt_length=None)
            assert prompts.report.left_out == told
    finally:
        case.tokenizer.chat_template = before


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages|dictsort }}",
        "{{ 'x'|truncate(-1) }}",
        "{{ 'x' * 10**15 }}",
        "{{ ''.__class__.__mro__ }}",
        "{% include '/etc/hostname' %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_whatever_a_template_raises_is_one_message(template: str, tiny: ModuleType) -> None:
    with pytest.raises(InputError, match=r"^the chat template fails on this conversation: \S"):
        Encoder(tiny.make_tokenizer(), template).chat.write([{"role": "user", "content": "x"}])
