"""Fields of messages that the chat template does not write, their weights, and columns that are not read."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf_core import TrainerConfig, data
from rlhf_core.tokenizer import Encoder, TextOptions
from rlhf_core.training import OnDevices

LAST_THOUGHT = (
    "{% for m in messages %}{{ m.role[:1] }} {% if m.reasoning_content and loop.last %}{{ m.reasoning_content }} "
    "{% endif %}{% if m.kind == 'x' %}e {% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{% endfor %} </s> {% endfor %}{% if add_generation_prompt %}a {% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ m.role[:1] }} {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}a {% endif %}"
)


def user(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def reply(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


@pytest.fixture
def tokenizer(tiny: ModuleType) -> Any:
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = LAST_THOUGHT
    return tokenizer


def ignored(tokenizer: Any, turns: list[Any], **options: Any) -> list[str]:
    chat = Encoder(tokenizer).chat
    return chat.ignored_fields(turns, chat.write(turns), **options)


def test_fields_that_the_text_lacks_are_ignored(tokenizer: Any) -> None:
    thought = reply("c", reasoning_content="d e f d e f d e f")
    call = [{"type": "function", "function": {"name": "b", "arguments": {}}}]
    assert ignored(tokenizer, [user("a"), thought]) == []
    other = reply("c", reasoning_content="another thought, of an earlier reply")
    assert ignored(tokenizer, [user("a"), other, user("a"), thought]) == ["reasoning_content"]
    assert ignored(tokenizer, [user("a"), thought, user("a"), reply("c")]) == ["reasoning_content"]
    assert ignored(tokenizer, [user("a", kind="x"), reply("", tool_calls=call)]) == []
    assert ignored(tokenizer, [user("a", name="carol"), reply("c", train=False, audio={"id": "1"})]) == [
        "name",
        "train",
        "audio",
    ]
    nothing = {"refusal": None, "tool_calls": [], "annotations": [], "name": ""}
    assert ignored(tokenizer, [user("a"), reply("c", **nothing)]) == []
    assert ignored(tokenizer, [user("a")], kwargs={"loop": 1, "enable": 1}) == ["chat_template_kwargs.enable"]
    cached = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]
    [message] = data.load([{"prompt": [user(cached)]}])[0]["prompt"]  # type: ignore[arg-type]
    assert ignored(tokenizer, [message]) == ["content.cache_control"]
    assert ignored(tokenizer, [user("a", weight=0), reply("b", weight=1)], learns=True) == []
    assert ignored(tokenizer, [user("a", weight=1), reply("b", weight=0)], learns=True) == ["weight"]
    assert ignored(tokenizer, [user("a", weight=0), reply("b", weight=1)]) == ["weight"]


def test_ignored_fields_are_found_where_a_system_prompt_is_added(tokenizer: Any) -> None:
    options = TextOptions(system_prompt="b")
    report = data.encode_texts(
        data.load([{"messages": [user("a", name="alice"), reply("c")]}]),
        tokenizer,
        max_length=None,
        chat_template=options,
    ).report
    assert report.field_counts == {"name": 1}


def test_every_kind_of_data_counts_ignored_fields(tokenizer: Any) -> None:
    asked = [user("a", name="alice"), reply("c", name="alice"), user("a")]
    rows = [{"prompt": asked}, {"prompt": [user("b")]}]
    pairs = [
        {**row, "chosen": [reply("c", refusal="a")], "rejected": [reply("d", refusal="a")]} for row in rows
    ]
    told = "with fields that the chat template ignores [name in 1"
    reports = [
        data.encode_prompts(data.load(rows), tokenizer, max_prompt_length=None).report,
        data.encode_pairs(data.load(pairs), tokenizer, max_length=None).report,
        data.encode_texts(data.load(pairs), tokenizer, max_length=None).report,
        data.Report("rows", None),
    ]
    for _ in data.whole_parts(data.load(pairs), Encoder(tokenizer), report=reports[-1]):
        pass
    for report, count in zip(reports, (1, 2, 2, 2), strict=True):
        assert f"{count} {told}" in str(report)
        assert not report.all_as_given
        assert report.field_counts == ({"name": 1} if count == 1 else {"name": 1, "refusal": 2})


def test_ignored_fields_are_cached_with_the_tokens(
    tokenizer: Any, kept_from: Callable[[int], Any], in_parts: Callable[[int], None]
) -> None:
    kept_from(2)
    in_parts(2)
    long = "é" * 40
    rows = [
        {"prompt": [user("a", **({"name": "alice"} if i == 1 else {long: 1} if i == 4 else {}))]}
        for i in range(5)
    ]
    first, second = (
        data.encode_prompts(data.load(rows), tokenizer, max_prompt_length=None).report for _ in range(2)
    )
    assert first == second
    assert first.ignored_fields == ["dataset row 2", "dataset row 5"]
    assert [name[:20] for name in first.field_counts] == ["name", long[:20]]


@pytest.mark.parametrize("template", ["plain", LAST_THOUGHT, MARKED])
def test_a_reply_with_weight_0_is_not_learned(template: str, tokenizer: Any) -> None:
    def learned(*weights: Any) -> list[str]:
        turns = [
            turn
            for text, weight in zip("cde", weights, strict=True)
            for turn in (user("a"), reply(text, weight=weight))
        ]
        records = data.load([{"messages": turns}, {"messages": [user("a"), reply("b")]}])
        texts = data.encode_texts(records, tokenizer, max_length=None, chat_template=template)
        if not any(weight != 0 for weight in weights):
            assert texts.report.empty == ["dataset row 1"]
            return []
        assert texts.learned is not None
        tokens, mask = texts.sequences["tokens"][0], texts.learned[0]
        words = tokenizer.convert_ids_to_tokens(tokens[mask])
        assert bool(mask[-1]) is (weights[-1] != 0)
        return [word for word in words if word in "cde"]

    assert learned(1, None, 1.0) == ["c", "d", "e"]
    assert learned(0, 1, 1) == ["d", "e"]
    assert learned(1, 0.0, 1) == ["c", "e"]
    assert learned(np.int64(1), 1, 0) == ["c", "d"]
    assert learned(0, 0, 0) == []


def test_columns_that_are_not_read_are_listed_and_no_reason_to_warn(
    tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer.chat_template = None
    pair = {"prompt": "a", "chosen": " b", "rejected": " c", "margin": 1, "score_chosen": 2.0}
    rows = [pair, {**pair, "id": 0, "chosen": " d"}]
    report = data.encode_pairs(data.load(rows), tokenizer, max_length=None).report
    assert report.not_read == ["unused columns: score_chosen (in 2), id (in 1)"]
    assert report.all_as_given
    assert report.lines()[-1] == report.not_read[0]
    stage: Any = SimpleNamespace(mesh=1, is_main=True, name="s", seed=0, registry=None, say=print)
    stage.inputs = {"train_dataset": rows, "tokenizer": tokenizer}
    stage.template_date = "2026-01-31"
    OnDevices(TrainerConfig(), stage).pairs("train_data")
    assert "train_data: unused columns: score_chosen (in 2)" in capsys.readouterr().out
    both = {"prompt": "a", "completion": " b", "system": "c", "tools": ["x"], "loss": 1.0}
    texts = data.encode_texts(data.load([both]), tokenizer, max_length=None, values=("loss",)).report
    assert texts.not_read == ["unused columns: system (in 1), tools (in 1)"]
