"""Templates that change their past, or leave out what a conversation with tools needs, are refused before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_core.environments import ConversationEncoder
from rlhf_core.errors import InputError
from tests.shared import chat_cases as chat

FINE = ""
AGAIN = 'environment.history = "encoded_again"'
OPENS = "rewrites earlier text when the conversation continues: "
THOUGHT = "omits a reply's thought when 'user' messages follow replies"
REFUSES = "refuses 'tool' messages after a reply"
SCHEMAS = "omits the schemas of tools"
CALLS = "omits the tool calls of replies"
LEAVES_OUT = "omits 'tool' messages"
PUBLISHED = {
    # user messages; tool messages; tool messages, with tools
    "cohere": (FINE, REFUSES, SCHEMAS),
    "deepseek_r1_distill": (OPENS, OPENS, SCHEMAS),
    "deepseekv3": (OPENS, OPENS, SCHEMAS),
    "gemma3": (FINE, REFUSES, SCHEMAS),
    "lfm2": (FINE, FINE, CALLS),
    "llama3": (FINE, FINE, SCHEMAS),
    "llama3_1": (FINE, FINE, FINE),
    "llama3_2": (FINE, FINE, FINE),
    "nemotron_3_nano": (OPENS, FINE, FINE),
    "phi3": (FINE, LEAVES_OUT, SCHEMAS),
    "phi3_5": (FINE, LEAVES_OUT, SCHEMAS),
    "qwen2_5": (FINE, FINE, FINE),
    "qwen3": (THOUGHT, FINE, FINE),
    "qwen3_5_think": (OPENS, FINE, FINE),
    "qwen3_instruct_2507": (FINE, FINE, FINE),
}
TOOL = chat.tool("qzxtool", x="string")
ALIKE = ("llama3_1", "phi3_5", "qwen2_5", "qwen3_5_think")
"""Each does as llama3_2, phi3, qwen3_instruct_2507 or nemotron_3_nano."""


@pytest.mark.data
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in ALIKE else name for name in PUBLISHED]
)
def test_published_templates(name: str, published: dict[str, Path], make_tokenizer: Any) -> None:
    path = published[name]
    encoder = ConversationEncoder(make_tokenizer(path.read_text()), str(path))
    for (role, tools), words in zip(
        [("user", None), ("tool", None), ("tool", [TOOL])], PUBLISHED[name], strict=True
    ):
        problem = encoder.problem(tools=tools, roles=[role])
        assert words in problem if problem else words == FINE, (role, problem)
        again: Any = encoder.problem(tools=tools, roles=[role], encoded_again=True)
        assert again == (None if words in (OPENS, THOUGHT, FINE) else problem)
        if problem:
            assert problem.startswith(f"the chat template {name}.jinja "), problem
            assert (AGAIN in problem) == (words in (OPENS, THOUGHT)), problem
    assert set(published) == set(PUBLISHED)


def encoder_for(text: str | None) -> ConversationEncoder:
    tokenizer = chat.byte_level(eos="<|im_end|>", pad="<|endoftext|>")
    tokenizer.chat_template = text
    return ConversationEncoder(tokenizer, "plain" if text is None else None)


OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
SCHEMA = "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"


def template(
    said: str, *, before: str = "", call: str = "", header: str = "{{ m.role }}", opened: str = OPEN
) -> str:
    """A template that writes messages `m` as `said`, with `messages` in reach."""
    calls = "{% for c in m.tool_calls or [] %}" + call + "{% endfor %}" if call else ""
    return f"{before}{{% for m in messages %}}<|im_start|>{header}\n{said}{calls}<|im_end|>\n{{% endfor %}}{opened}"


CALL = "<tool_call>{{ c.function | tojson }}</tool_call>"
WHOLE = template("{{ m.content or '' }}", before=SCHEMA, call=CALL)
FRESH = {
    "thoughts of earlier turns are cut": (
        "user",
        template("{{ m.content.split('</think>')[-1] if not loop.last else m.content }}"),
        "omits a reply's thought",
    ),
    "thoughts in marks of its own are cut": (
        "user",
        template("{{ m.content.split('[/THINK]')[-1] if not loop.last else m.content }}"),
        "omits a reply's thought",
    ),
    "only the last three messages count": (
        "user",
        "{% set messages = messages[-3:] if messages | length > 4 else messages %}" + template("{{ m.content }}"),
        OPENS,
    ),
    "the number of messages comes first": (
        "user",
        template("{{ m.content }}", before="{{ messages | length }} messages\n"),
        OPENS,
    ),
    "the prompt opens a thought": (
        "user",
        template("{{ m.content }}", opened=OPEN.replace("assistant\n", "assistant\nThought: ")),
        OPENS,
    ),
    "thoughts in their own field are dropped later": (
        "user",
        template("{{ m.reasoning_content + '\n' if m.reasoning_content and loop.last }}{{ m.content }}"),
        "omits a reply's thought",
    ),
    "what follows depends on the reply": (
        "user",
        template(
            "{{ m.content }}{{ '\n(after a thought)' if not loop.first and m.role == 'user' and "
            "'think' in messages[loop.index0 - 1].content }}"
        ),
        "depends on what the reply says",
    ),
    "calls change later": (
        "tool",
        template(
            "{{ m.content or '' }}",
            before=SCHEMA,
            call="<tool_call>{{ c.function | tojson if messages | length < 5 else c.function.name }}</tool_call>",
        ),
        OPENS,
    ),
    "results are cut later": (
        "tool",
        template(
            "{{ '(cut)' if m.role == 'tool' and not loop.last else m.content or '' }}", before=SCHEMA, call=CALL
        ),
        OPENS,
    ),
    "results are dropped": (
        "tool",
        template("{{ m.content or '' if m.role != 'tool' }}", before=SCHEMA, call=CALL),
        LEAVES_OUT,
    ),
    "arguments are dropped": (
        "tool",
        template("{{ m.content or '' }}", before=SCHEMA, call="<tool_call>{{ c.function.name }}</tool_call>"),
        CALLS,
    ),
    "thoughts beside calls are dropped": (
        "tool",
        template(
            "{{ (m.content or '').split('</think>')[-1] if m.tool_calls else m.content or '' }}",
            before=SCHEMA,
            call=CALL,
        ),
        "omits a reply's thought",
    ),
    "text beside calls is dropped later": (
        "tool",
        template("{{ m.content or '' if not m.tool_calls or loop.last }}", before=SCHEMA, call=CALL),
        "omits a reply's t",
    ),
    "schemas are dropped": ("tool", template("{{ m.content or '' }}", call=CALL), SCHEMAS),
    "calls are refused": (
        "tool",
        template("{{ m.content or '' }}", before=SCHEMA, call="{{ raise_exception('no calls') }}"),
        "refuses tool calls, or 'tool' messages after a reply",
    ),
    "the role is refused": (
        "tool",
        template("{{ raise_exception('no tools') if m.role == 'tool' else m.content }}", before=SCHEMA, call=CALL),
        "no tools",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FRESH)
def test_what_a_template_may_do_is_found(name: str) -> None:
    role, text, words = FRESH[name]
    problem = encoder_for(text).problem(tools=[TOOL] if role == "tool" else None, roles=[role])
    assert problem is not None
    assert words in problem, problem
    assert problem.removeprefix("what ").startswith("the tokenizer's chat template ")


def test_roles_are_tried_together() -> None:
    """It drops the results of tools once the user has said something more."""
    before = (
        SCHEMA + "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    )
    said = "{{ '' if m.role == 'tool' and loop.index0 < ns.last else m.content or '' }}"
    encoder = encoder_for(template(said, before=before, call=CALL))
    assert encoder.problem(tools=[TOOL], roles=["tool"]) is None
    assert encoder.problem(tools=[TOOL], roles=["user"]) is None
    assert OPENS in str(encoder.problem(tools=[TOOL], roles=["user", "tool"]))
    added = [{"role": "tool", "name": "qzxtool", "content": "1"}]
    said_first = [chat.user("a"), chat.assistant("b"), *added, chat.assistant("c")]
    with pytest.raises(InputError, match=OPENS):
        encoder.observation(said_first, [chat.user("d")], ended_by=None, tools=[TOOL])


def test_what_is_accepted_depends_on_the_roles_that_appear() -> None:
    encoder = encoder_for(WHOLE)
    assert encoder.problem(tools=[TOOL], roles=["user", "tool", "system"]) is None
    alone = template("{{ m.content or '' if not m.tool_calls }}", before=SCHEMA, call=CALL)
    assert (
        encoder_for(alone).problem(tools=[TOOL], roles=["tool"]) is None
    )  # `CallParser` makes no such replies
    assert encoder_for(None).problem(tools=None, roles=["user"]) is None
    assert encoder_for(chat.CHATML).problem(tools=None, roles=["user"]) is None

    said = "{{ '' if m.role == 'developer' else m.content or '' }}"
    encoder = encoder_for(template(said, before=SCHEMA, call=CALL))
    assert encoder.problem(tools=None, roles=["user"]) is None
    assert "omits 'developer' messages" in str(encoder.problem(tools=None, roles=["user", "developer"]))

    said = "{{ raise_exception('no system') if m.role == 'system' else m.content }}"
    encoder = encoder_for(template(said))
    assert encoder.problem(tools=None, roles=["user"]) is None
    assert "no system" in str(encoder.problem(tools=None, roles=["system"]))


def test_names_of_templates(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(chat.FORGETS)
    tokenizer = chat.byte_level()
    for given, name in [
        (str(tmp_path / "own.jinja"), "the chat template own.jinja"),
        (chat.FORGETS, "the given chat template"),
        ("plain", "the chat template plain"),
        (None, "the tokenizer's chat template"),
    ]:
        assert ConversationEncoder(tokenizer, given).name == name
