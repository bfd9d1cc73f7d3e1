"""Message contents that are lists of parts."""

from __future__ import annotations

import json
import pickle
from types import ModuleType
from typing import Any

import pandas as pd
import pytest

from rlhf_core import data
from rlhf_core.tokenizer import Encoder

PARTS: list[Any] = [{"type": "text", "text": "a "}, {"type": "input_text", "text": "b"}]
JOINED = "{% for m in messages %}{{ m.role[:1] ~ ' ' ~ m.content }} </s> {% endfor %}"
CALLED = "{% for m in messages %}{{ m.role[:1] + ' ' + m.content }} </s> {% endfor %}"
EITHER = (
    "{% for m in messages %}{{ m.role[:1] }} {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text | trim }} | {% endfor %}{% endif %} </s> {% endfor %}"
)
PARTS_ALONE = (
    "{% for m in messages %}{{ m.role[:1] }} {% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
    "{% endif %}{% endfor %} </s> {% endfor %}"
)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def reply(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


@pytest.fixture
def tokenizer(tiny: ModuleType) -> Any:
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = JOINED
    return tokenizer


@pytest.mark.parametrize(
    ("template", "several", "one"),
    [
        (JOINED, "u a b </s> ", "u a b </s> "),
        (CALLED, "u a b </s> ", "u a b </s> "),
        (EITHER, "u a | b |  </s> ", "u a b </s> "),
        (PARTS_ALONE, "u a b </s> ", "u a b </s> "),
    ],
)
def test_a_template_gets_parts_if_it_takes_them_and_their_text_otherwise(
    template: str, several: str, one: str, tokenizer: Any
) -> None:
    tokenizer.chat_template = template
    encoder = Encoder(tokenizer)
    assert encoder.chat.write([user(PARTS)]) == several
    assert encoder.chat.write([user("a b")]) == one
    [message] = data.load([{"prompt": [user(PARTS)]}])[0]["prompt"]
    assert encoder.chat.write([pickle.loads(pickle.dumps(message))]) == several
    assert not encoder.chat.leaves_out([message], several)


def test_parts_are_read_wherever_messages_are(tokenizer: Any) -> None:
    """As texts, JSON in a cell, lists of completions, arrays, ShareGPT's form and a column under another name."""

    def both(**columns: Any) -> list[Any]:
        joined = json.loads(json.dumps(columns).replace(json.dumps(PARTS), '"a b"'))
        return [data.load([columns]), data.load([joined])]

    def ids(records: data.Records, kind: str) -> Any:
        if kind == "pairs":
            pairs = data.encode_pairs(records, tokenizer, max_length=None, completions=True)
            return [*(ids[0].tolist() for ids in pairs.sequences.values()), pairs.starts]
        if kind == "texts":
            return data.encode_texts(records, tokenizer, max_length=None).sequences["tokens"][0].tolist()
        if kind == "prompts":
            return data.encode_prompts(records, tokenizer, max_prompt_length=None).ids[0].tolist()
        [whole] = data.whole_parts(records, Encoder(tokenizer))
        return [row.tolist() for row in whole.sequences[0] or ()]

    talk = [user(PARTS), reply(PARTS)]
    pair = {"prompt": [user(PARTS)], "chosen": [reply(PARTS)], "rejected": [reply("c")]}
    listed = {
        "prompt": "a b",
        "chosen": [[user(PARTS), reply("c")]],
        "rejected": [[user("a b"), reply(PARTS)]],
    }
    tool = [user("a"), reply("b"), {"role": "tool", "content": PARTS}, reply("c")]
    for kind, columns in (
        ("texts", {"messages": talk}),
        ("texts", {"messages": tool}),
        ("texts", {"messages": json.dumps(talk)}),
        ("texts", {"conversations": [{"from": "human", "value": PARTS}, {"from": "gpt", "value": PARTS}]}),
        ("texts", {"prompt": [user(PARTS)], "completion": [reply(PARTS)]}),
        ("prompts", {"prompt": [user(PARTS)]}),
        ("pairs", pair),
        ("pairs", {**pair, "prompt": "a b", "chosen": talk, "rejected": [user("a b"), reply("c")]}),
        ("scores", pair),
        ("scores", {"messages": talk}),
        ("scores", listed),
    ):
        first, second = (ids(records, kind) for records in both(**columns))
        assert str(first) == str(second), (kind, columns)
    named = data.load([{"talk": talk}], columns={"messages": "talk"})
    assert ids(named, "texts") == ids(data.load([{"messages": talk}]), "texts")
    frame = pd.DataFrame({"messages": [[user(["a ", "b"]), reply([])]]})
    assert [m["content"] for m in data.load(frame)[0]["messages"]] == ["a b", ""]
    assert Encoder(tokenizer).prompts([[user(PARTS)]])[0].tolist() == ids(both(**pair)[0], "prompts")
