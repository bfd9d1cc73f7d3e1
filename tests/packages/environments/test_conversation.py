"""What a policy sampled stays as it is; what stands around it is as in the tokenised text of the whole conversation."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from rlhf_core.contracts import Turn
from rlhf_core.environments import ConversationEncoder, EnvironmentCalls, EnvironmentOptions, try_episode
from rlhf_core.errors import InputError
from rlhf_core.tokenizer import TextOptions
from tests.shared import chat_cases as chat

TOOLS = [chat.tool(name, x="string") for name in ("add", "look_up")]
PLAIN = "Zq"
THINKS = "<think>\nZp\n</think>\n\nZq"


class Template(NamedTuple):
    """What a published template takes. end: of a reply. dummy: a reply that continues its generation prompt."""

    end: str
    roles: tuple[str, ...] = ("user",)
    tools: bool = False
    several: int = 3
    calls: int = 3
    dummy: str = PLAIN


TEMPLATES = {
    "cohere": Template("<|END_OF_TURN_TOKEN|>", several=1),
    "gemma3": Template("<end_of_turn>", several=1),
    "lfm2": Template("<|im_end|>", ("user", "tool"), calls=0),
    "llama3": Template("<|eot_id|>", ("user", "tool"), calls=0),
    "llama3_1": Template("<|eot_id|>", ("user", "tool"), True, calls=1),
    "llama3_2": Template("<|eot_id|>", ("user", "tool"), True, calls=1),
    "nemotron_3_nano": Template("<|im_end|>", ("tool",), True, dummy=THINKS),
    "phi3": Template("<|end|>"),
    "phi3_5": Template("<|end|>"),
    "qwen2_5": Template("<|im_end|>", ("user", "tool"), True),
    "qwen3": Template("<|im_end|>", ("tool",), True),
    "qwen3_5_think": Template("<|im_end|>", ("tool",), True, dummy=THINKS),
    "qwen3_instruct_2507": Template("<|im_end|>", ("user", "tool"), True),
}
ALIKE = ("llama3_1", "phi3_5", "qwen2_5", "qwen3", "qwen3_5_think")
"""Each writes a conversation much as llama3_2, phi3, qwen3_instruct_2507 or nemotron_3_nano does."""
OPTIONS = TextOptions(chat_template_kwargs={"date_string": "26 Jul 2024"})
LETTERS = "abyZ09 \n\t<>|{}[]\"'\\/:.,éß漢字🙂👩‍🚀\u200d\u0301\u202e\xa0"


def random_text(draw: np.random.Generator, most: int = 12) -> str:
    letters = [LETTERS[i] for i in draw.integers(0, len(LETTERS), draw.integers(0, most + 1))]
    wild = [chr(c) for c in draw.integers(0x21, 0xD7FF, draw.integers(0, 4))]
    return "".join([*letters, *wild])


def random_reply(draw: np.random.Generator, calls: int) -> dict[str, Any]:
    """A message whose words are never those of the tokens that were sampled for it, nor of any dummy."""
    reply: dict[str, Any] = {"role": "assistant", "content": random_text(draw)}
    if draw.random() < 0.3:
        reply["content"] = f"<think>{random_text(draw)}</think>{reply['content']}"
    if calls:
        functions = [{"name": "add", "arguments": {"x": random_text(draw)}} for _ in range(calls)]
        reply["tool_calls"] = [{"type": "function", "function": function} for function in functions]
    return reply


def with_dummies(messages: list[dict[str, Any]], template: Template) -> list[dict[str, Any]]:
    """Put a reply of the test's own in place of each, with a call for each result up to the next reply."""
    dummied: list[dict[str, Any]] = []
    for k, message in enumerate(messages):
        if message["role"] == "assistant":
            following = messages[k + 1 :]
            ends = [n for n, m in enumerate(following) if m["role"] == "assistant"]
            results = [m for m in following[: ends[0] if ends else None] if m["role"] == "tool"]
            message = {"role": "assistant", "content": template.dummy}
            if results and template.calls:
                message["tool_calls"] = [
                    {"type": "function", "function": {"name": m["name"], "arguments": {"x": "Zq"}}}
                    for m in results[: template.calls]
                ]
        dummied.append(message)
    return dummied


def expected(tokenizer: Any, messages: Any, template: Template, tools: Any) -> list[tuple[list[int], int]]:
    """The tokens of the whole text outside its replies, in pieces, each with the number of tokens that end the reply.

    They come from one call of the tokenizer, whose offsets say where each token stands.
    """

    def rendered(turns: Any, *, opened: bool) -> str:
        return tokenizer.apply_chat_template(
            turns, tools=tools, tokenize=False, add_generation_prompt=opened, date_string="26 Jul 2024"
        )

    dummied = with_dummies(messages, template)
    text = rendered(dummied, opened=True)
    starts, ends = [], [0]
    for k, message in enumerate(dummied):
        if message["role"] != "assistant":
            continue
        before = rendered(dummied[:k], opened=True)
        assert text.startswith(before)
        starts.append(len(before))
        said = text.index("Zq", len(before)) if "Zq" in text[len(before) :] else len(before)
        ends.append(text.index(template.end, said))
    starts.append(len(text))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    pieces = []
    for n, (end, start) in enumerate(zip(ends, starts, strict=True)):
        inside = [
            i
            for i, (a, b) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
            if b > end and a < start
        ]
        pieces.append((inside, int(n > 0)))
    return pieces


def check(encoder: ConversationEncoder, template: Template, draw: np.random.Generator) -> None:
    """Sample one conversation as a rollout does, and compare what stands around the replies."""
    tokenizer = encoder.tokenizer
    end = tokenizer.convert_tokens_to_ids(template.end)
    tools = TOOLS if template.tools else None
    messages: list[dict[str, Any]] = []
    if draw.random() < 0.5 and template.several > 1:
        messages.append({"role": "system", "content": random_text(draw)})
    messages += [
        {"role": "user", "content": random_text(draw)} for _ in range(draw.integers(1, template.several + 1))
    ]
    pieces, sampled = [encoder.prompt(messages, tools)], []
    stops = []
    for _ in range(draw.integers(1, 5)):
        role = str(draw.choice(template.roles))
        added: list[dict[str, Any]] = [
            {"role": role, "content": random_text(draw), **({"name": "add"} if role == "tool" else {})}
            for _ in range(draw.integers(1, template.several + 1))
        ]
        if role == "tool" and template.roles != ("tool",) and draw.random() < 0.3:
            added.append({"role": "user", "content": random_text(draw)})
        reply = draw.integers(4, len(tokenizer), draw.integers(0, 9)).tolist()
        stop = [None, end, *encoder.stop_ids][draw.integers(0, 2 + len(encoder.stop_ids))]
        reply = [i for i in reply if i not in encoder.stop_ids] + ([] if stop is None else [stop])
        messages.append(random_reply(draw, int(draw.integers(0, 3)) if role == "tool" else 0))
        pieces.append(encoder.observation(messages, added, ended_by=stop, tools=tools))
        messages += added
        sampled.append(reply)
        stops.append(stop)
    wanted = expected(tokenizer, messages, template, tools)
    assert len(wanted) == len(pieces)
    for k, (piece, (ids, ending)) in enumerate(zip(pieces, wanted, strict=True)):
        assert piece.dtype == np.int32
        if k:
            assert ids[0] == end
            ids = ids[ending:] if stops[k - 1] is not None else ids
        assert piece.tolist() == ids, (k, stops, json.dumps(messages, ensure_ascii=False))


@pytest.mark.data
@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in ALIKE else name for name in TEMPLATES]
)
def test_tokens_around_replies_are_those_of_the_whole_text(
    name: str, count: int, published: dict[str, Path], make_tokenizer: Any
) -> None:
    template = TEMPLATES[name]
    text = published[name].read_text()
    marks = tuple(make_tokenizer(text).get_added_vocab())
    problems: Any = {}  # of the template, whatever the tokens are
    for number, (swallows, before) in enumerate(
        [((), ()), ((template.end,), ()), (marks, ()), ((), (template.end,))]
    ):
        tokenizer = make_tokenizer(text, swallows=swallows, swallows_before=before)
        tokenizer.chat_template = text
        encoder = ConversationEncoder(tokenizer, OPTIONS, [tokenizer.convert_tokens_to_ids("<|eom_id|>")])
        encoder._problems = problems
        for seed in range(count // 4):
            check(encoder, template, np.random.default_rng([number, seed]))


CASES = {name: case for name, case in chat.cases().items() if name not in ("thinks", "forgets")}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ending", ["cut", "stop", "other stop"])
def test_tokenizers_of_all_kinds(name: str, ending: str) -> None:
    """Byte-level and SentencePiece, with and without a token that ends replies, BOS and EOS of their own."""
    case = CASES[name]
    tokenizer = case.tokenizer
    encoder = ConversationEncoder(tokenizer, "plain" if case.template is None else None, [2])
    end = tokenizer.convert_tokens_to_ids(case.stops[0]) if case.stops else None
    ended_by = {"cut": None, "stop": end, "other stop": 2}[ending]
    messages: list[dict[str, Any]] = [*case.prompt]
    template = Template(case.stops[0] if case.stops else "")
    ids = encoder.prompt(messages, case.tools).tolist()
    for number in range(3):
        added = [chat.user(f"in: a  b\n{number}\n\nab é")]
        messages.append(chat.assistant(f" other words {number} "))
        observation = encoder.observation(messages, added, ended_by=ended_by, tools=case.tools).tolist()
        messages += added
        dummied = with_dummies(messages, template)
        text, special = encoder.encoder.text(dummied, open_turn=True, tools=case.tools)
        before, _ = encoder.encoder.text(dummied[:-2], open_turn=True, tools=case.tools)
        assert text.startswith(before)
        at = text.index(PLAIN, len(before)) + len(PLAIN)
        at = text.index(template.end, at) if template.end else at
        encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
        spans = [
            (i, a)
            for i, (a, b) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
            if b > at
        ]
        wanted = [i for i, _ in spans]
        if special and tokenizer("a")["input_ids"][-1] == tokenizer.eos_token_id:
            wanted = wanted[:-1] if wanted[-1] == tokenizer.eos_token_id else wanted
        if template.end and ended_by is not None:
            assert wanted[0] == end
            wanted = wanted[1:]
        assert observation == wanted
    assert ids[: len(ids)] == encoder.encoder.prompts([case.prompt], [case.tools])[0].tolist()


def test_what_the_template_refuses_and_what_tokens_would_join_are_input_errors() -> None:
    tokenizer = chat.byte_level(bos="<s>")
    tokenizer.chat_template = chat.GEMMA
    encoder = ConversationEncoder(tokenizer)
    assert encoder.problem(tools=None, roles=["user"]) is None
    with pytest.raises(InputError, match="System role not supported"):
        encoder.prompt([chat.SYSTEM, chat.user("a")])

    template = HEADED + "{{ 'ab' if m.role == 'assistant' else '' }}\n{% endfor %}" + OPENED
    tokenizer = chat.byte_level()
    tokenizer.chat_template = template
    encoder = ConversationEncoder(tokenizer)
    assert encoder.observation(SAID, [chat.user("c")], ended_by=None).size
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend["model"]["vocab"] |= {"ya": len(tokenizer)}
    backend["model"]["merges"].insert(0, ["y", "a"])
    joined = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(backend)), eos_token="</s>"
    )
    joined.chat_template = template
    with pytest.raises(InputError, match="the tokenizer merges the end of a reply with what"):
        ConversationEncoder(joined).observation(SAID, [chat.user("c")], ended_by=None)


HEADED = "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}"
OPENED = "{% if add_generation_prompt %}assistant:{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}"
STRICT = """\
{{- bos_token -}}
{%- set ns = namespace(turn=0) -%}
{%- for m in messages -%}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) -%}
{%- if (m.role == 'user') != (ns.turn % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}
{%- set ns.turn = ns.turn + 1 -%}
{%- endif -%}
{%- if m.role == 'user' -%}[INST]{{ m.content }}[/INST]
{%- elif m.tool_calls -%}
[TOOL_CALLS][
{%- for c in m.tool_calls -%}
{%- if c.id is not defined or c.id | length != 9 -%}{{ raise_exception('ids have nine characters') }}{%- endif -%}
{{- {'name': c.function.name, 'arguments': c.function.arguments, 'id': c.id} | tojson -}}{{- ', ' if not loop.last -}}
{%- endfor -%}
]{{ eos_token }}
{%- elif m.role == 'tool' -%}
{%- if m.tool_call_id | length != 9 -%}{{ raise_exception('ids have nine characters') }}{%- endif -%}
[TOOL_RESULTS]{{ {'content': m.content, 'call_id': m.tool_call_id} | tojson }}[/TOOL_RESULTS]
{%- else -%}{{ ' ' + m.content + eos_token }}
{%- endif -%}
{%- endfor -%}
"""


def observed(
    template: str, messages: Any, added: Any, ended_by: int | None, tools: Any = None, **kinds: Any
) -> Any:
    tokenizer = chat.byte_level(**kinds)
    tokenizer.chat_template = template
    ids = ConversationEncoder(tokenizer).observation(messages, added, ended_by=ended_by, tools=tools)
    return tokenizer.decode(ids), ids.tolist(), tokenizer


def result(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "name": "add", "content": content, **more}


def called(*ids: str) -> dict[str, Any]:
    function = {"name": "add", "arguments": {"x": "1"}}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": i, "function": function} for i in ids]}


SAID = [chat.user("a"), chat.assistant("b")]
WORDS = HEADED + "{{ '\n[end]' + eos_token if m.role == 'assistant' }}\n{% endfor %}" + OPENED
NAMED = (
    "{% for m in messages %}{% if m.tool_calls %}<|im_start|>assistant to={{ m.tool_calls[0].function.name }}\n"
    "{{ m.content }}{{ m.tool_calls[0].function.arguments | tojson }}{% elif m.role == 'tool' %}<|im_start|>"
    "{{ messages[loop.index0 - 1].tool_calls[0].function.name }}\n{{ m.content }}{% else %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
TWO_CALLS = [chat.user("a"), called("abcdefghi", "123456789")]
TWO_RESULTS = [result("2", tool_call_id="abcdefghi"), result("3", tool_call_id="123456789")]
MADE_UP_ID = '[TOOL_RESULTS]{"content": "2", "call_id": "000000000"}[/TOOL_RESULTS]'


@pytest.mark.parametrize(
    ("template", "kinds", "said", "added", "ended_by", "text"),
    [
        # Words before the token that ends a reply follow a cut one; blanks before it are not supplied.
        (WORDS, {}, SAID, [chat.user("c")], None, "\n[end]</s>\nuser: c\nassistant:"),
        (WORDS, {}, SAID, [chat.user("c")], 1, "\nuser: c\nassistant:"),
        (chat.LLAMA2, {"bos": "<s>"}, SAID, [chat.user("c")], None, "</s><s>[INST] c [/INST]"),
        (chat.LLAMA2, {"bos": "<s>"}, SAID, [chat.user("c")], 1, "<s>[INST] c [/INST]"),
        # A BOS that equals EOS follows it, and neither is taken for a second BOS.
        (chat.LLAMA2, {"bos": "</s>"}, SAID, [chat.user("c")], None, "</s></s>[INST] c [/INST]"),
        (chat.LLAMA2, {"bos": "</s>"}, SAID, [chat.user("c")], 1, "</s>[INST] c [/INST]"),
        # A strict template gets the ids of the calls, and takes calls without ids and malformed ones.
        (
            STRICT,
            {"bos": "<s>"},
            TWO_CALLS,
            TWO_RESULTS,
            None,
            '</s>[TOOL_RESULTS]{"content": "2", "call_id": "abcdefghi"}[/TOOL_RESULTS]'
            '[TOOL_RESULTS]{"content": "3", "call_id": "123456789"}[/TOOL_RESULTS]',
        ),
        (STRICT, {"bos": "<s>"}, [chat.user("a"), called()], [result("2")], 1, MADE_UP_ID),
        (
            STRICT,
            {"bos": "<s>"},
            [chat.user("a"), chat.assistant("[TOOL_CALLS][{")],
            [result("2")],
            1,
            MADE_UP_ID,
        ),
        # Results are written under the names that were called.
        (
            NAMED,
            {"eos": "<|im_end|>"},
            [chat.user("a"), called("x")],
            [{"role": "tool", "content": "2"}],
            None,
            "<|im_end|>\n<|im_start|>add\n2<|im_end|>\n<|im_start|>assistant",
        ),
        # What stands for a reply's words may be words of the conversation.
        (
            chat.CHATML,
            {"eos": "<|im_end|>", "pad": "<|endoftext|>"},
            [chat.user("qzxreply qzxlast"), chat.assistant("qzxlast<|im_end|>qzxreply")],
            [chat.user("qzxreply\nqzxlast")],
            None,
            "<|im_end|>\n<|im_start|>user\nqzxreply\nqzxlast<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
)
def test_what_stands_around_a_reply(
    template: str, kinds: Any, said: Any, added: Any, ended_by: int | None, text: str
) -> None:
    found, ids, tokenizer = observed(template, said, added, ended_by, **kinds)
    assert found == text
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_calls_of_a_template_without_an_end_of_turn() -> None:
    template = HEADED + CALLS + "{{ '\\n' }}{% endfor %}" + OPENED
    text, ids, tokenizer = observed(template, [chat.user("a"), called("x")], [result("2")], None)
    assert text == "\ntool: 2\nassistant:"
    other = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert observed(template, [chat.user("a"), called("x")], [result("2")], other)[1] == ids


def test_a_stop_token_that_begins_the_next_turn_is_not_repeated() -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    said = SAID, [chat.user("c")]
    text, _, tokenizer = observed(template, *said, None, eos="<|endoftext|>")
    assert text == "<|user|>\nc<|assistant|>\n"
    ids = [tokenizer.convert_tokens_to_ids(token) for token in ("<|user|>", "<|endoftext|>")]
    assert observed(template, *said, ids[0], eos="<|endoftext|>")[0] == "\nc<|assistant|>\n"
    assert observed(template, *said, ids[1], eos="<|endoftext|>")[0] == text


def test_sentencepiece_without_a_token_that_ends_replies() -> None:
    """A text alone would begin with a space that it does not begin with after a reply or a special token."""
    tokenizer = chat.sentencepiece()
    tokenizer.chat_template = HEADED + "{{ ' ' }}{% endfor %}" + OPENED
    encoder = ConversationEncoder(tokenizer)
    said = [chat.user("a"), chat.assistant("b")]
    for role, text in (("user", " user: ab b assistant:"), ("tool", " tool: ab b assistant:")):
        added = [{"role": role, "content": "ab b"}]
        for ended_by, before in (
            (None, "a bc"),
            (tokenizer.convert_tokens_to_ids("<|endoftext|>"), "<|endoftext|>"),
        ):
            start = len(tokenizer(before, add_special_tokens=False)["input_ids"])
            whole = tokenizer(before + text, add_special_tokens=False)["input_ids"]
            assert encoder.observation(said, added, ended_by=ended_by).tolist() == whole[start:]
        cut = encoder.observation(said, added, ended_by=None).tolist()
        assert cut != tokenizer(text, add_special_tokens=False)["input_ids"]


def encoder_of(template: str, stop_ids: Any = (), **kinds: Any) -> ConversationEncoder:
    tokenizer = chat.byte_level(**kinds)
    tokenizer.chat_template = template
    return ConversationEncoder(tokenizer, None, stop_ids)


def test_calls_and_results_keep_their_ids_and_get_those_that_they_lack() -> None:
    encoder = encoder_of(HEADED + CALLS + "{% endfor %}" + OPENED)
    nameless = {"type": "function", "function": {"name": "add", "arguments": {"x": "1"}}}
    first = {**called("a"), "tool_calls": [*called("a")["tool_calls"], nameless]}
    second = {**first, "tool_calls": [nameless]}
    more = [result("4"), result("5"), second, result("6"), result("7", tool_call_id="b")]
    completed = encoder.with_call_ids([chat.user("a"), first, result("2"), result("3"), *more])
    assert [call["id"] for m in completed for call in m.get("tool_calls", ())] == [
        "a",
        "000000000",
        "000000003",
    ]
    assert [m["tool_call_id"] for m in completed if m["role"] == "tool"] == [
        *("a", "000000000", "000000001", "000000002"),  # two more than were called
        *("000000003", "b"),
    ]
    said = [chat.assistant("b"), chat.user("c"), result("2"), result("3")]
    assert [m["tool_call_id"] for m in encoder.with_call_ids(said)[2:]] == ["000000000", "000000001"]


def test_the_first_and_longest_token_after_a_reply_ends_it_and_none_of_the_next_turn() -> None:
    encoder = encoder_of(HEADED + "{{ ' <e><e>+<f>' if m.role == 'assistant' }};{% endfor %}" + OPENED)
    encoder.stops = {7: "<f>", 8: "<e>", 9: "<e><e>"}
    tail = encoder.tail(SAID, [chat.user("c")])
    assert (tail.end, tail.start, tail.stop, tail.bordered) == (9, 1, 7, True)
    encoder.stops = {7: "<f>", 8: "<e>"}
    tail = encoder.tail(SAID, [chat.user("c")])
    assert (tail.end, tail.start, tail.stop) == (8, 1, 4)
    encoder.stops = {7: "<f>"}
    assert not encoder.tail(SAID, [chat.user("c")]).bordered

    header = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}" + header
    tokenizer = chat.byte_level()
    end = tokenizer.convert_tokens_to_ids("<|user|>")
    encoder = encoder_of(template, [end])
    assert end in encoder.stops
    assert encoder.tail(SAID, [chat.user("c")]).end is None
    assert encoder.tail(SAID, [chat.user("c")]).text.startswith("<|user|>c")


def test_what_a_tail_cannot_be_made_of_is_refused() -> None:
    """Also where nobody asked for `problem` first."""
    called_for = "{{ 'R' if loop.index0 and messages[loop.index0 - 1].tool_calls }}"
    refuses = (
        "{{ raise_exception('no call') if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls }}"
    )
    unknown = "writes no stop token after a reply with tool calls"
    for template, said, added, message in (
        (
            "{{ messages | length }}" + HEADED + "{% endfor %}" + OPENED,
            SAID,
            chat.user("c"),
            "rewrites earlier text",
        ),
        (
            "{% for m in messages %}{{ m.role }}:{{ m.content if m.role == 'user' }}{% endfor %}" + OPENED,
            SAID,
            chat.user("c"),
            "omits the content of a reply",
        ),
        (HEADED + CALLS + called_for + "{% endfor %}" + OPENED, [SAID[0], called("x")], result("2"), unknown),
        (HEADED + CALLS + refuses + "{% endfor %}" + OPENED, [SAID[0], called("x")], result("2"), unknown),
    ):
        with pytest.raises(InputError, match=message):
            encoder_of(template).tail(said, [added])
    encoder = encoder_of(chat.FORGETS, eos="<|im_end|>", pad="<|endoftext|>")
    with pytest.raises(InputError, match=r"omits a reply's thought.*environment.history = \"encoded_again\""):
        encoder.observation(SAID, [chat.user("c")], ended_by=None)


def test_a_changed_past_is_quoted_from_twenty_characters_before() -> None:
    encoder = encoder_of(HEADED + "{% endfor %}")
    for same, shown in (("ab", "ab"), ("x" * 20, "x" * 20), ("yab" + "x" * 18, "ab" + "x" * 18)):
        said = encoder.rewrites(same + "c" * 40, same + "d" * 40)
        assert f"{shown + 'c' * 30!r} becomes {shown + 'd' * 30!r}" in said


def test_a_stop_token_may_have_the_id_zero() -> None:
    zero = chat.byte_level().convert_ids_to_tokens(0)
    template = HEADED + "{{ eos_token if m.role == 'assistant' }};{% endfor %}" + OPENED
    said = SAID, [chat.user("c")]
    cut, ids, tokenizer = observed(template, *said, None, eos=zero, pad=None)
    assert tokenizer.eos_token_id == ids[0] == 0
    assert observed(template, *said, 0, eos=zero, pad=None)[1] == ids[1:]
    assert cut.endswith(";user: c;assistant:")


class Asks:
    """Ends after `turns` completions; its lock keeps it in this process."""

    def __init__(self, turns: int) -> None:
        self.turns, self.lock = turns, threading.Lock()

    def reset(self, row: Any, seed: int) -> list[dict[str, Any]]:
        return [chat.user(row["question"])]

    def step(self, completion: dict[str, Any]) -> Turn:
        assert completion["role"] == "assistant"
        self.turns -= 1
        return Turn([chat.user("and then ?")], 0.5, done=self.turns == 0)


@pytest.mark.parametrize("turns", [1, 2])
def test_what_an_episode_answers_first_is_measured_before_a_run(turns: int) -> None:
    """With the end of the reply and the header of the next turn; an episode that ends has no answer."""
    tokenizer = chat.byte_level()
    ends = "{{ eos_token if m.role == 'assistant' else '\\n' }}{% endfor %}"
    tokenizer.chat_template = HEADED + ends + OPENED
    calls = EnvironmentCalls(EnvironmentOptions(), lambda: Asks(turns), "here")
    said = try_episode(calls, ConversationEncoder(tokenizer), {"question": "what ?"}, "row 1", 64)
    prompt, answer = (
        len(tokenizer(text, add_special_tokens=False)["input_ids"])
        for text in ("user: what ?\nassistant:", "</s>user: and then ?\nassistant:")
    )
    begins = f"row 1 begins with {prompt} tokens"
    assert said == (begins if turns == 1 else f"{begins}; the answer to a made-up completion has {answer}")
