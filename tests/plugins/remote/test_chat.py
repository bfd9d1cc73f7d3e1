"""`rlhf chat` with a model that it serves itself and one behind a URL."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from rlhf_remote.chat import HELP, Dialogue, ReplyPart, _lines, talk

from rlhf_core import load_model
from rlhf_core.errors import InputError, RunError
from tests.shared import commands, services

TEMPLATE = (
    "{% for m in messages %}{{ m.role[:1] + ' ' + m.content + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'A ' }}{% endif %}"
)


def chat(typed: str, *arguments: Any, fails: str | None = None) -> str:
    """What is printed; where a line has no reply, the command ends with an error that says so."""
    result = commands.rlhf("chat", *arguments, typed=typed, fails=fails is not None)
    if fails is not None:
        assert isinstance(result.exception, RunError)
        assert str(result.exception) == fails
    return str(result.output)


@pytest.fixture(scope="module")
def model(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat")
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    dataclasses.replace(tiny.make_model(scale=20), tokenizer=tokenizer).save(path / "model")
    return path


def test_a_model_that_is_served_here_says_what_generate_says(model: Path, tmp_path: Path, tiny: Any) -> None:
    """Two turns, with a system message: each reply is the completion of all that was said; on a base in 8 bits."""
    base = load_model(model / "model", mesh=tiny.one_device(), quantized="int8")
    adapter = tiny.save_policy(base.with_lora(rank=2), tmp_path)
    flags = ("--max_completion_length", 20, "--temperature", 0)
    saved = tmp_path / "said.jsonl"
    printed = chat(f"b c d\n//e f\n/save {saved}\n", adapter, "--system", "a b", *flags)
    (row,) = [json.loads(line) for line in saved.read_text().splitlines()]
    messages = row["messages"]
    assert [m["content"] for m in messages[:2]] == ["a b", "b c d"]
    assert messages[3] == {"role": "user", "content": "/e f"}
    assert messages[2]["content"]
    assert printed == f"{messages[2]['content']}\n{messages[4]['content']}\n{saved}: 5 messages added\n"
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": messages[:n]}) + "\n" for n in (2, 4)))
    commands.rlhf("generate", adapter, file, "-o", tmp_path / "out", *flags)
    completions = [json.loads(line)["completion"] for line in (tmp_path / "out").read_text().splitlines()]
    assert completions == [messages[2]["content"], messages[4]["content"]]


def test_a_conversation_that_is_too_long_and_one_that_ends_early() -> None:
    def reply(body: Any) -> Any:
        if "max_tokens" not in body:  # /tokenize
            return {"tokens": [1], "count": len(body["messages"][-1]["content"])}
        return events(delta(content="said"))

    with services.serve(reply) as service:
        service.models = {"data": [{"id": "m", "max_model_len": 128}]}
        typed = f"{'a' * 128}\nb c\n/undo\n/undo\n"
        fails = "1 of 2 lines had no reply"
        printed = chat(typed, service.url, "--max_completion_length", 3, fails=fails)
    assert "the conversation has 128 tokens, and 128 are possible: type /undo or /reset" in printed
    assert printed.endswith("said\n0 exchanges left\n0 exchanges left\n")


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unknown"}')
    with pytest.raises(InputError, match="unknown"):
        commands.rlhf("chat", tmp_path)


def test_the_readme_lists_what_can_be_typed() -> None:
    page = Path(__file__).parents[3] / "plugins/remote/README.md"
    text = page.read_text(encoding="utf-8")
    table = text.partition("| typed | does |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(/\w+)", table)) == set(re.findall(r"^(/\w+)", HELP, re.MULTILINE))


def events(*parts: Any) -> Any:
    lines = [f"data: {json.dumps(part)}\n\n" for part in parts]
    return (
        200,
        "".join([": a comment\n\n", *lines, "data: [DONE]\n\n"]).encode(),
        {"content-type": "text/event-stream"},
    )


def delta(**content: Any) -> Any:
    return {"choices": [{"index": 0, "delta": content}]}


def test_a_model_behind_a_url_streams(tmp_path: Path) -> None:
    bodies: list[Any] = []

    def reply(body: Any) -> Any:
        if "max_tokens" not in body:  # /tokenize
            return {"tokens": [1], "count": 500}
        bodies.append(body)
        if "fail" in body["messages"][-1]["content"]:
            return (400, {"error": {"message": "too long"}}, {})
        if "break" in body["messages"][-1]["content"]:
            return events(delta(content="half"), {"error": {"message": "out of memory"}})
        return events(
            delta(role="assistant"),
            delta(reasoning_content="hm"),
            delta(content="so\x1b[2J "),
            {"choices": []},
            delta(content="said"),
        )

    with services.serve(reply) as service:
        service.models = {"data": [{"id": "gpt-9.5", "max_model_len": 600}]}
        typed = "one\nfail\nbreak\ntwo\n/reset\n/system S\nthree\n/what\n/save\n/help\n/exit\nnever\n"
        printed = chat(typed, service.url, "--seed", 3, "--top_k", 5, fails="2 of 5 lines had no reply")
    assert printed.count("hm\nso\\x1b[2J said\n") == 3
    assert "HTTP 400: too long" in printed
    assert "half\n" in printed
    assert "out of memory" in printed
    assert "/what: no such command" in printed
    assert "/undo" in printed
    said = {"role": "assistant", "content": "so\x1b[2J said"}
    user = [{"role": "user", "content": text} for text in ("one", "two", "three")]
    assert bodies[3]["messages"] == [user[0], said, user[1]]
    assert bodies[4]["messages"] == [{"role": "system", "content": "S"}, user[2]]
    assert {name: bodies[4][name] for name in ("seed", "top_k", "stream", "model", "max_tokens")} == {
        "seed": 5,
        "top_k": 5,
        "stream": True,
        "model": "gpt-9.5",
        "max_tokens": 100,  # what the context leaves
    }


class Slow:
    """Says a word, then waits for Ctrl-C."""

    name = "slow"

    def __init__(self) -> None:
        self.closed = 0

    def reply(self, messages: Any, number: int) -> Generator[ReplyPart, None, None]:
        try:
            yield ReplyPart("word")
            os.kill(os.getpid(), signal.SIGINT)
            yield ReplyPart(" more")
            yield ReplyPart(" never")
        finally:
            self.closed += 1


def test_ctrl_c_stops_a_reply_and_twice_leaves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = iter(["one", KeyboardInterrupt])

    def line() -> str:
        given = next(typed)
        if given is KeyboardInterrupt:
            raise KeyboardInterrupt
        return f"{given}\n"

    monkeypatch.setattr(
        "sys.stdin", type("Typed", (), {"readline": staticmethod(line), "isatty": lambda _: False})()
    )
    speaker: Any = Slow()
    conversation = Dialogue()
    before = signal.getsignal(signal.SIGINT)
    talk(conversation, speaker)
    assert signal.getsignal(signal.SIGINT) is before
    assert [turn["content"] for turn in conversation.turns] == ["one", "word"]
    assert capsys.readouterr().out == "word (stopped)\n"
    assert speaker.closed == 1


def test_lines_of_a_reply_end() -> None:
    parts = [b"data: 1\r\nda", b"ta: \xe4", b"\xb8\xad\n\nrest"]
    assert list(_lines("http://a", parts)) == ["data: 1", "data: 中", "", "rest"]
    endless = (b"x" * 65536 for _ in itertools.count())
    with pytest.raises(RunError, match=r"^http://a: a line of the reply has more than 1,048,576 bytes$"):
        list(_lines("http://a", endless))


@pytest.mark.parametrize("event", ["[" * 100_000, "3", '{"choices": [{"delta": null}]}'])
def test_an_event_of_another_form_is_an_error_that_names_the_address(event: str) -> None:
    def reply(body: Any) -> Any:
        return {"tokens": [1]} if "max_tokens" not in body else (200, f"data: {event}\n\n".encode(), {})

    with services.serve(reply) as service:
        printed = chat("a\n", service.url, fails="1 of 1 lines had no reply")
    assert f"{service.url}/v1/chat/completions: expected an event of a chat" in " ".join(printed.split())
