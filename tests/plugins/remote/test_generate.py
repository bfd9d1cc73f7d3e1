"""The prompts and options of `rlhf generate`, and its warnings about texts for chat models and empty completions."""

from __future__ import annotations

import dataclasses
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_core import data, sampling
from rlhf_core.errors import InputError
from rlhf_core.sampling import Rollouts
from rlhf_core.tokenizer import load_tokenizer
from tests.shared import commands

run = partial(commands.rlhf, "generate")
TEMPLATE = (
    "{% for m in messages %}{{ m.role[:1] + ' ' + m.content + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'A ' }}{% if x is defined %}{{ x }}{% endif %}{% endif %}"
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Collect the sampler's prompts; it writes "a b", and its extra stop token if it has one."""
    prompts: list[list[int]] = []

    def sample(self: Any, params: Any, given: Any, key: Any) -> Rollouts:
        prompts.extend(ids.tolist() for ids in given)
        n = len(given) * self.num_generations
        said = [*self.said, self.stop_ids[-1]]
        tokens = np.tile(np.array(said, np.int32), (n, 1))
        return Rollouts(
            tokens, np.full(n, len(said), np.int32), np.zeros(tokens.shape, np.float32), np.ones(n, bool)
        )

    monkeypatch.setattr(sampling.Sampler, "__call__", sample)
    monkeypatch.setattr(sampling.Sampler, "said", [3, 4], raising=False)
    return prompts


@pytest.fixture
def model(tiny: Any, tmp_path: Path) -> Path:
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    dataclasses.replace(tiny.make_model("lm"), tokenizer=tokenizer).save(tmp_path / "model")
    return tmp_path / "model"


def ids(tiny: Any, text: str) -> list[int]:
    found: list[int] = tiny.make_tokenizer()(text)["input_ids"]
    return found


def test_a_prompt_is_what_a_user_says(tiny: Any, model: Path, asked: list[list[int]], tmp_path: Path) -> None:
    assert run(model, "--prompt", "c d").output.strip() == "a b"
    run(model, "--prompt", "c d", "--chat_template_kwargs", '{"x": "f"}')
    run(model, "--prompt", "c d", "--raw")
    wanted = ["u c d </s> A", "u c d </s> A f", "c d"]
    assert asked == [ids(tiny, text) for text in wanted]
    out = tmp_path / "out.jsonl"
    run(model, "--prompt", "c d", "-o", out)
    assert tiny.read_rows(out) == [{"prompt": "c d", "completion": "a b", "finished": True}]
    tiny.make_model("lm").save(tmp_path / "plain")  # no template: texts go on
    run(tmp_path / "plain", "--prompt", "c d")
    assert asked[-1] == ids(tiny, "c d")


def test_rows_of_messages_are_prompts(
    tiny: Any, model: Path, asked: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, reply = {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}
    rows = tiny.write_rows(tmp_path / "rows.jsonl", [{"messages": [user, reply]}, {"messages": [user]}])
    out = tmp_path / "out.jsonl"
    run(model, rows, "-o", out)
    assert asked == [ids(tiny, "u c </s> A")] * 2
    assert [row["completion"] for row in tiny.read_rows(out)] == ["a b"] * 2
    assert tiny.read_rows(out)[0]["messages"] == [user, reply]
    assert set(tiny.read_rows(out)[0]) == {"messages", "completion", "finished"}
    tokenizer = load_tokenizer(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|channel>", "<channel|>"]})
    tokenizer.save_pretrained(model)
    opening, closing = tokenizer.convert_tokens_to_ids(["<|channel>", "<channel|>"])
    monkeypatch.setattr(sampling.Sampler, "said", [opening, 3, closing, 4])
    run(model, rows, "-o", out)  # a thought in a channel of its own is apart
    assert [tiny.read_rows(out)[0][name] for name in ("completion", "reasoning_content")] == [" b", "a"]
    bad = tiny.write_rows(tmp_path / "bad.jsonl", [{"messages": [user]}, {"messages": [reply]}])
    with pytest.raises(Exception, match=r"bad\.jsonl row 2: 'messages' has no turn to reply to"):
        run(model, bad)


def test_a_prompt_that_is_too_long_is_refused_or_cut_with_a_warning_and_a_mark(
    tiny: Any, model: Path, asked: list[list[int]], tmp_path: Path
) -> None:
    rows = tiny.write_rows(tmp_path / "rows.jsonl", [{"prompt": "c d e"}, {"prompt": "c"}])
    out = tmp_path / "out.jsonl"
    with pytest.warns(UserWarning, match=r"rows\.jsonl row 1: up to 3 tokens, cut to the last 2"):
        run(model, rows, "--raw", "-o", out, "--max_prompt_length", 2)
    assert asked == [ids(tiny, "d e"), ids(tiny, "c")]
    assert [row.get("prompt_tokens_cut") for row in tiny.read_rows(out)] == [1, None]
    limit = ["--max_completion_length", tiny.SIZES["max_position_embeddings"] - 2]
    with pytest.raises(InputError, match=r"--prompt row 2: up to 3 tokens, .* context of 128 leaves 2 for a"):
        run(model, "--raw", "--prompt", "c", "--prompt", "c d e", *limit)
    run(model, "--raw", "--prompt", "c d", *limit)
    assert asked[-1] == ids(tiny, "c d")


def test_completions_that_run_past_the_context_are_a_warning(
    tiny: Any, model: Path, asked: list[list[int]]
) -> None:
    positions = tiny.SIZES["max_position_embeddings"]
    run(model, "--raw", "--prompt", "c " * (positions - 3))  # the answer has three tokens
    with pytest.warns(
        UserWarning, match=r"1 of 1 completions, .* up to 129 tokens, run past .* context of 128"
    ):
        run(model, "--raw", "--prompt", "c " * (positions - 2))


def test_prompts_that_are_left_out_are_named(
    tiny: Any, model: Path, asked: list[list[int]], tmp_path: Path
) -> None:
    rows = tiny.write_rows(tmp_path / "rows.jsonl", [{"prompt": ""}, {"prompt": "c"}])
    with pytest.warns(UserWarning, match=r"1 kept, 1 empty dropped \(.*rows\.jsonl row 1\)"):
        run(model, rows, "--raw")


def test_a_stop_token_of_ones_own_is_no_part_of_the_text(
    tiny: Any, model: Path, asked: list[list[int]]
) -> None:
    assert run(model, "--prompt", "c", "--stop_token_ids", ids(tiny, "h")[0]).output.strip() == "a b"


def test_texts_for_a_chat_model_and_empty_completions_are_warned_of(
    tiny: Any, model: Path, asked: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tiny.write_rows(tmp_path / "rows.jsonl", [{"prompt": "c"}])
    with pytest.warns(UserWarning, match=r"plain texts that skip the chat template"):
        run(model, rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model, rows, "--raw")
        run(model, "--prompt", "c")
    monkeypatch.setattr(sampling.Sampler, "said", [])
    with pytest.warns(UserWarning, match=r"1 of 1 completions are empty: .* write prompts as messages"):
        run(model, "--prompt", "c")


@pytest.mark.parametrize("chat", [False, True])
def test_texts_for_a_chat_model_are_reported_for_every_stage(chat: bool, tiny: Any) -> None:
    tokenizer = tiny.make_tokenizer()

    def turns(role: str, text: str) -> Any:
        return [{"role": role, "content": text}] if chat else text

    prompt, side = turns("user", "a"), turns("assistant", " b")
    rows = [{"prompt": prompt, "completion": side, "chosen": side, "rejected": turns("assistant", " c")}]

    def reports() -> list[Any]:
        pick = lambda *names: data.load([{n: row[n] for n in names} for row in rows])  # noqa: E731
        return [
            data.encode_prompts(pick("prompt"), tokenizer, max_prompt_length=None).report,
            data.encode_texts(pick("prompt", "completion"), tokenizer, max_length=None).report,
            data.encode_texts(pick("prompt", "chosen", "rejected"), tokenizer, max_length=None).report,
            data.encode_pairs(pick("prompt", "chosen", "rejected"), tokenizer, max_length=None).report,
        ]

    tokenizer.chat_template = TEMPLATE
    for report in reports():
        assert ("1 plain texts that skip the chat template" in str(report)) is not chat
        assert len(report.untemplated) == 1 - chat
    texts = data.encode_texts(data.load([{"text": "a b"}]), tokenizer, max_length=None).report
    assert texts.all_as_given  # a text by itself is no turn of a conversation
    if not chat:
        tokenizer.chat_template = None
        assert all(report.all_as_given for report in reports())


def test_a_system_message_precedes_prompts_without_one(
    asked: list[list[int]], model: Path, tiny: Any, tmp_path: Path
) -> None:
    run(model, "--prompt", "c d", "--system", "e f")
    rows = [
        {"prompt": [{"role": role, "content": "e f"}, {"role": "user", "content": "c d"}]}
        for role in ("system",)
    ]
    run(model, tiny.write_rows(tmp_path / "own.jsonl", rows), "--system", "g")
    assert asked[0] == asked[1]
    plain = tiny.write_rows(tmp_path / "plain.jsonl", [{"prompt": "c d"}])
    for arguments in ([plain], ["--prompt", "c", "--raw"]):
        result = commands.rlhf("generate", model, *arguments, "--system", "g", fails=True)
        assert "--system" in str(result.exception or result.output)


def test_flags_reach_the_sampler(tmp_path: Path, tiny: Any) -> None:
    tiny.make_model(scale=6.0).save(tmp_path / "model")

    def generate(*flags: str) -> str:
        limits = ("--max_completion_length", "12", "--temperature", "0")
        return str(run(tmp_path / "model", "--prompt", "a b", *limits, *flags).stdout.rstrip("\n"))

    plain = generate().split()
    assert len(plain) > 5
    stop = " ".join(plain[3:5])
    ended = generate("--stop_strings", "no such words", "--stop-strings", stop)
    at = " ".join(plain).index(stop)
    assert ended.strip() == " ".join(plain)[: at + len(stop)]
    ids = [str(tiny.WORDS.index(word)) for word in ("Q", plain[3])]
    ended = generate("--stop_token_ids", ids[0], "--stop_token_ids", ids[1])
    assert ended.split() == plain[: plain.index(plain[3])]  # without the token that ended it
    varied = generate("--repetition_penalty", "50").split()
    assert len(set(varied)) > len(set(plain))
