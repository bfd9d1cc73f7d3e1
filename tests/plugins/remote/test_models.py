"""`rlhf generate` and `rlhf score` with a URL for MODEL, asking scripted servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rlhf_remote import service as sending

from rlhf_core.errors import InputError, RunError
from tests.shared import commands, services

SERVED = {
    "data": [
        {"id": "policy", "kind": "language_model"},
        {"id": "rm", "kind": "reward_model"},
    ]
}


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "FIRST_WAIT", 0.001)
    monkeypatch.delenv("RLHF_API_KEY", raising=False)


def run(*arguments: Any) -> str:
    return str(commands.rlhf(*arguments).output)


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def choices(*texts: str, chat: bool = True) -> Any:
    """An answer in any order of choices."""
    return {
        "choices": [
            {
                "index": i,
                **({"message": {"content": text}} if chat else {"text": text}),
                "finish_reason": "stop" if text else "length",
            }
            for i, text in reversed(list(enumerate(texts)))
        ]
    }


def test_generate_sends_chats_and_texts_with_every_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_API_KEY", "sk-in-the-environment")
    chat = [{"role": "user", "content": "b"}]
    rows = [
        {"prompt": chat, "tools": [{"type": "function"}], "chat_template_kwargs": {"x": 1}, "id": 7},
        {"prompt": [{"role": "system", "content": "s"}, *chat], "id": 8},
    ]
    file, out = write(tmp_path / "in.jsonl", *rows), tmp_path / "out.jsonl"
    flags = "--max_completion_length 9 --temperature 0.5 --top_p 0.8 --top_k 3 --min_p 0.1 --repetition_penalty 1.5 "
    flags += "--stop_strings X --stop_token_ids 4 --num_generations 2 --seed 5"
    with services.serve(lambda body: choices("A", "")) as service:
        service.models = SERVED
        printed = run("generate", service.url, file, "-o", out, "--system", "S", *flags.split())
    assert printed == f"{out}: 4 completions\n"
    settings = {
        "model": "policy",
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.8,
        "top_k": 3,
        "min_p": 0.1,
        "n": 2,
        "repetition_penalty": 1.5,
        "stop": ["X"],
        "include_stop_str_in_output": True,
        "stop_token_ids": [4],
    }
    path, key = "/v1/chat/completions", "Bearer sk-in-the-environment"
    wanted = [
        {
            **settings,
            "seed": 5,
            "messages": [{"role": "system", "content": "S"}, *chat],
            "tools": [{"type": "function"}],
            "chat_template_kwargs": {"x": 1},
        },
        {**settings, "seed": 6, "messages": rows[1]["prompt"]},
    ]
    assert sorted(service.requests, key=lambda each: each[2]["seed"]) == [
        (path, key, body) for body in wanted
    ]
    assert [json.loads(line) for line in out.read_text().splitlines()] == [
        {**row, "completion": text, "finished": bool(text)} for row in rows for text in ("A", "")
    ]


@pytest.mark.parametrize(
    ("owner", "fills_in"), [("vllm", True), ("sglang", True), ("openai", False), (3, False)]
)
def test_flags_have_the_same_defaults_as_with_a_directory(owner: Any, fills_in: bool) -> None:
    """Of servers that take what is left out from generation_config.json; others may not know the fields."""
    neutral = {
        "top_k": -1,
        "min_p": 0,
        "repetition_penalty": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
    }

    def reply(body: Any) -> Any:
        said = {"choices": [{"delta": {"content": "B"}}]}
        return (200, f"data: {json.dumps(said)}\n\n".encode(), {}) if body.get("stream") else choices("A")

    with services.serve(reply) as service:
        service.models = {"data": [{"id": "policy", "owned_by": owner, "max_model_len": "64"}]}
        run("generate", service.url, "--prompt", "a")
        run("generate", service.url, "--prompt", "a", "--top_k", 3)
        commands.rlhf("chat", service.url, typed="b\n")
    plain, given, chat = (body for _, _, body in service.requests if "max_tokens" in body)
    for body in (plain, chat):
        assert {name: body.get(name) for name in neutral} == (neutral if fills_in else dict.fromkeys(neutral))
        assert body["top_p"] == 1
    assert given["top_k"] == 3


@pytest.mark.parametrize("count", ["7", True, None, [7], {}])
def test_a_count_of_tokens_that_is_none_changes_nothing(count: Any) -> None:
    def reply(body: Any) -> Any:
        return choices("A") if "max_tokens" in body else {"count": count}

    with services.serve(reply) as service:
        service.models = {"data": [{"id": "policy", "max_model_len": 64}]}
        run("generate", service.url, "--prompt", "a")
    assert next(body for _, _, body in service.requests if "max_tokens" in body)["max_tokens"] == 256


@pytest.mark.parametrize("content", [["A"], {"text": "A"}, 3])
def test_a_completion_is_a_text(content: Any) -> None:
    with services.serve(lambda body: choices(content)) as service:
        service.models = SERVED
        with pytest.raises(RunError, match="expected 1 choices, got"):
            run("generate", f"{service.url}#policy", "--prompt", "a")


@pytest.mark.parametrize(("tokens", "asked"), [(7, 57), (None, 256), (64, 256)])
def test_a_completion_ends_where_the_context_does(tokens: int | None, asked: int) -> None:
    def reply(body: Any) -> Any:
        if "max_tokens" in body:
            return choices("written", chat=False)
        return (404, {}, {}) if tokens is None else {"count": tokens}

    with services.serve(reply) as service:
        service.models = {"data": [{"id": "policy", "max_model_len": 64}]}
        run("generate", service.url, "--prompt", "Hi", "--raw")
    assert service.requests[-1][2]["max_tokens"] == asked


@pytest.mark.parametrize("template", [True, False])
def test_prompts_of_the_command_line_go_where_the_template_says(template: bool) -> None:
    def reply(body: Any) -> Any:
        if "max_tokens" not in body:  # /tokenize
            return {"tokens": [1]} if template else (400, {"error": {"message": "no chat template"}}, {})
        return choices("said") if "messages" in body else choices("written", chat=False)

    with services.serve(reply) as service:
        said = run("generate", service.url, "--prompt", "one", "--prompt", "two", "--temperature", 0)
        assert said == ("said\nsaid\n" if template else "written\nwritten\n")
        assert run("generate", service.url, "--prompt", "one", "--raw") == "written\n"


def test_which_model_a_url_means() -> None:
    names: list[str] = []

    def reply(body: Any) -> Any:
        names.append(body["model"])
        return choices("x", chat=False)

    with services.serve(reply) as service:
        for models, at, wanted in ((["a"], "", "a"), (["a", "b"], "/v1/#b", "b"), ([], "#c", "c")):
            service.models = {"data": [{"id": name} for name in models]}
            run("generate", service.url + at, "--prompt", "x", "--raw")
            assert names.pop() == wanted
    with pytest.raises(InputError, match=f"cannot reach {service.url}/v1/models: .*; start the server"):
        run("generate", service.url, "--prompt", "x")


PAIRS = [{"prompt": "p", "chosen": "g", "rejected": "b", "subset": s} for s in ("x", "x", "y")]


def test_scores_of_pairs(tmp_path: Path) -> None:
    file, out = write(tmp_path / "pairs.jsonl", *PAIRS), tmp_path / "scored.jsonl"

    def reply(body: Any) -> Any:
        data = [{"index": i, "chosen_score": i / 2, "rejected_score": 0.25} for i in range(len(body["rows"]))]
        return {"data": data[::-1]}

    with services.serve(reply) as service:
        service.models = SERVED
        printed = run("score", service.url, file, "-o", out)
        ((path, _, body),) = service.requests
    assert (path, body["model"]) == ("/score", "rm")
    assert body["rows"] == [{"prompt": "p", "chosen": "g", "rejected": "b"}] * 3
    assert "accuracy 0.6667: 2 of 3 pairs scored higher" in printed
    assert [json.loads(line) for line in out.read_text().splitlines()] == [
        {**row, "chosen_score": i / 2, "rejected_score": 0.25} for i, row in enumerate(PAIRS)
    ]


def test_scores_of_many_rows_go_on_where_they_ended(tmp_path: Path) -> None:
    """A row without a score is null; a command that failed asks for the remaining rows only."""
    rows = [{"prompt": "p", "completion": str(i)} for i in range(300)]
    file, out = write(tmp_path / "in.jsonl", *rows), tmp_path / "out.jsonl"

    def reply(body: Any) -> Any:
        numbers = [int(row["completion"]) for row in body["rows"]]
        return {"data": [{"index": i, "score": None if n == 7 else n} for i, n in enumerate(numbers)]}

    with services.serve(reply) as service:
        service.models = SERVED
        service.reply = lambda body: reply(body) if len(body["rows"]) == 256 else (400, {"error": "no"}, {})
        with pytest.raises(InputError, match=r"in.jsonl row 257 and the next 43: .*HTTP 400: no"):
            run("score", service.url, file, "-o", out)
        service.reply, service.requests = reply, []
        with pytest.warns(UserWarning, match=r"no score for rows without a completion: \S*in.jsonl row 8"):
            printed = run("score", service.url, file, "-o", out)
        assert f"{out}: resuming after 256 rows" in printed
        assert [len(body["rows"]) for _, _, body in service.requests] == [44]
    scores = [json.loads(line)["score"] for line in out.read_text().splitlines()]
    assert scores == [None if i == 7 else float(i) for i in range(300)]


def test_a_server_that_answers_another_row(tmp_path: Path) -> None:
    one = write(tmp_path / "one.jsonl", {"prompt": "p", "completion": "c"})
    with services.serve(lambda _: {"data": [{"index": 1, "score": 0}]}) as service:
        service.models = SERVED
        with pytest.raises(RunError, match="expected data with the scores of 1 rows, got"):
            run("score", service.url, one)
