"""The rewards `http` and `judge`, asking scripted services."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rlhf_remote import service as sending
from rlhf_remote.rubric import Scale

from rlhf_core import REWARD, InputError, RunError, installed_registry, plugins
from tests.plugins.remote.score_cases import STATED
from tests.shared import services
from tests.shared.plans import identified_of

KEY = "sk-very-secret"
PROMPTS, COMPLETIONS = ["a?", "b?", "c?"], ["{prompt}", "yes", "no"]
ANSWERS = ["A", "B", None]


LOOP = asyncio.new_event_loop()
"""All calls share an event loop, as in a run."""
COLUMNS = {"answer": ANSWERS}


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "FIRST_WAIT", 0.001)


class Asked:
    """A reward as a stage has it. logged: the metrics of its newest call."""

    def __init__(self, directory: Path, *, name: str, **options: Any) -> None:
        self.reward = installed_registry().get(REWARD, name, **options)
        self.stage: Any = SimpleNamespace(dir=directory)
        self.logged: dict[str, float] = {}
        if name == "judge":
            self.reward.setup(self.stage)

    def check(self, **columns: Any) -> None:
        given = [self.stage] if hasattr(self.reward, "setup") else []
        self.reward.check(columns or COLUMNS, *given)

    def scores(
        self, prompts: Any = PROMPTS, completions: Any = COMPLETIONS, **columns: Any
    ) -> list[float | None]:
        self.check()
        self.logged = {}
        given = columns or COLUMNS
        found = self.reward(prompts, completions, log_metric=self.logged.__setitem__, **given)
        return list(LOOP.run_until_complete(found))


def test_a_service_gets_texts_and_columns_and_gives_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY_OF_TESTS", KEY)

    def reply(body: Any) -> Any:
        return {"scores": [None if text == "no" else len(text) for text in body["completions"]]}

    with services.serve(reply) as service:
        options = {"url": f"{service.url}/grade", "columns": ["answer"], "batch_size": 2, "concurrency": 1}
        asked = Asked(tmp_path, name="http", api_key={"env": "THE_KEY_OF_TESTS"}, **options)
        assert asked.scores() == [8.0, 3.0, None]
        assert service.requests == [
            (
                "/grade",
                f"Bearer {KEY}",
                {"prompts": PROMPTS[:2], "completions": COMPLETIONS[:2], "columns": {"answer": ["A", "B"]}},
            ),
            (
                "/grade",
                f"Bearer {KEY}",
                {"prompts": ["c?"], "completions": ["no"], "columns": {"answer": [None]}},
            ),
        ]
        assert asked.logged == {"failed_requests": 0, "unanswered": 0}


def next_of(script: Iterator[Any], _: Any) -> Any:
    return next(script)


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        (
            [(503, {"error": {"message": f"busy with {KEY}"}}, {"retry-after": "0"})],
            r"HTTP 503: busy with \*+ \(3 req",
        ),
        ([(429, b"slow down", {})], "HTTP 429: slow down"),
        ([{"scores": [1.0]}], r'expected {"scores": \[3 numbers or nulls\]}, got {"scores": \[1.0\]}'),
        ([{"scores": [1, "x", 2]}, {"scores": [1, float("nan"), 2]}], "3 numbers or nulls"),
        ([(200, b"<html>", {})], "the answer is not JSON: <html>"),
        *(
            ([(200, b'{"scores": [1, %b, 2]}' % odd, {})], "expected .*3 numbers or nulls")
            for odd in (b"true", b"[2]", b"1e999")
        ),
        ([(200, b'{"scores": [1, 2, 3, 4]}', {})], "3 numbers or nulls"),
        ([(200, b" " * 1001, {})], "the answer has more than 1,000 bytes"),
    ],
)
def test_failures_are_retried_then_stop_or_are_counted(
    answers: list[Any], problem: str, tmp_path: Path
) -> None:
    """Two failures are survived by two retries, and three are not."""
    with services.serve(lambda _: None) as service:

        def options(**more: Any) -> dict[str, Any]:
            given = {"name": "http", "url": service.url, "retries": 2, "api_key": KEY}
            return {**given, "max_answer_bytes": 1000, **more}

        for failures in (2, 3):
            script = [*(answers * 3)[:failures], {"scores": [1, 2, 3]}]
            service.reply = functools.partial(next_of, iter(script))
            asked = Asked(tmp_path, on_error="skip", **options())
            assert asked.scores() == ([1.0, 2.0, 3.0] if failures == 2 else [None] * 3)
            assert asked.logged == {"failed_requests": failures, "unanswered": 0 if failures == 2 else 3}
        service.reply = functools.partial(next_of, iter(answers * 3))
        with pytest.raises(RunError, match=problem) as caught:
            Asked(tmp_path, **options()).scores()
        assert "rerun the same command" in str(caught.value)
        assert KEY not in str(caught.value)


def test_a_wrong_key_ends_the_run_and_a_refused_text_only_its_batch(tmp_path: Path) -> None:
    def too_long(body: Any) -> Any:
        return (400, {"detail": "too long"}, {}) if body["completions"] == ["yes"] else {"scores": [1]}

    options: dict[str, Any] = {"name": "http", "batch_size": 1, "on_error": "skip"}
    with (
        services.serve(lambda _: (403, {"error": "not yours"}, {})) as service,
        pytest.raises(RunError, match="HTTP 403: not yours"),
    ):
        Asked(tmp_path, url=service.url, **options).scores()
    with services.serve(too_long) as service:
        assert Asked(tmp_path, url=service.url, **options).scores() == [1.0, None, 1.0]
        assert len(service.requests) == 3  # none was repeated


def test_waiting_times() -> None:
    assert sending.retry_after("7") == 7
    assert sending.retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert sending.retry_after("99999") == sending.LONGEST_RETRY_AFTER
    assert sending.retry_after("soon") == sending.retry_after(None) == 0
    assert sending.api_root("http://h:1") == sending.api_root("http://h:1/v1/#m") == "http://h:1/v1"
    assert sending.api_root("https://h/v1beta/openai/") == "https://h/v1beta/openai"


RUBRIC = (
    'Question: {prompt}\nGolden: {answer}\nAnswer: {completion}\nReply {{score}}, as {"a": 1}, Score: 1-9.'
)


def judge(tmp_path: Path, url: str, **options: Any) -> dict[str, Any]:
    rubric = tmp_path / "rubric.txt"
    rubric.write_text(RUBRIC)
    return {"name": "judge", "url": url, "model": "gpt-9.5", "rubric_file": str(rubric), **options}


def said(text: str) -> Any:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def test_a_judge_reads_rubric_and_scale(tmp_path: Path) -> None:
    """Texts are put in once: a completion that is a place itself stays; a row whose column is null is not judged."""

    def reply(body: Any) -> Any:
        return said(
            "Score: 3 is too little. **Score:** 7.5"
            if "yes" in body["messages"][0]["content"]
            else "Score: 2"
        )

    with services.serve(reply) as service:
        asked = Asked(tmp_path, **judge(tmp_path, service.url, request={"top_p": 0.5}))
        assert asked.scores() == [2.0, 7.5, None]
        bodies = sorted((body for _, _, body in service.requests), key=str)
        text = 'Question: a?\nGolden: A\nAnswer: {prompt}\nReply {score}, as {"a": 1}, Score: 1-9.'
        assert bodies[0] == {
            "model": "gpt-9.5",
            "messages": [{"role": "user", "content": text}],
            "temperature": 0.0,
            "max_tokens": 512,
            "top_p": 0.5,
        }
        assert {path for path, _, _ in service.requests} == {"/v1/chat/completions"}
        assert service.gets == ["/v1/models"]


@pytest.mark.parametrize(
    ("scale", "answer", "number"),
    [
        (Scale(1, 10, None, re.compile(r"(\d+)/10")), "first 3/10, then 11/10", None),
        (Scale(1, 10, None, re.compile(r"(\d+)/10")), "first 11/10, then 3/10", 3.0),
        (
            Scale(words={"yes": 1.0, "No": 0.0}, pattern=re.compile(r"(?i)\b(yes|no|maybe)\b")),
            "Yes. But NO",
            0.0,
        ),
        (Scale(words={"yes": 1.0}, pattern=re.compile(r"(?i)\b(yes|no)\b")), "no", None),
        (Scale(pattern=re.compile(r"-?\d+")), "-4", -4.0),
        (Scale(pattern=re.compile(r"\S+$")), "inf", None),
        (Scale(pattern=re.compile(r"\S+$")), "-1,000.5", -1000.5),
        (Scale(pattern=re.compile(r"\S+$")), "\N{MINUS SIGN}4", -4.0),
        (Scale(pattern=re.compile(r"\S+$")), "1_0", None),
        (Scale(pattern=re.compile(r"A: (\d)|B")), "A: 4, B", None),
        # A part of a number is none.
        (Scale(pattern=re.compile(r"\d+")), "7.5", None),
        (Scale(pattern=re.compile(r"\d")), "10", None),
        (Scale(pattern=re.compile(r"\d+")), "it is -4", None),
        # Thoughts are not read, whether or not their end or their beginning is there.
        (Scale(pattern=re.compile(r"\d+")), "<think>7</think> I cannot tell", None),
        (Scale(pattern=re.compile(r"</think>\s*(\d+)")), "7</think> 3", 3.0),
        (Scale(pattern=re.compile(r"\d+")), "4 <think> or 7", 4.0),
        # "n of m" and "n percent" count where the scale says what m is.
        (Scale(0, 10), "Score: 7/10", 7.0),
        (Scale(0, 100), "Score: 7/10", None),
        (Scale(0, 100), "Score: 85%", 85.0),
        (Scale(0, 5), "Score (0-10): 4", None),
        (Scale(0, 5), "Score: 7", None),
        (Scale(words={"7": 1.0}), "Score: 7", 1.0),
        (
            Scale(schema={"properties": {"score": {"type": "number"}}}),
            '<think>{"score": 2}</think>{"score": 4.5}',
            4.5,
        ),
        (Scale(schema={"type": "object"}), '{"score": 1e999}', None),
        (Scale(schema={"type": "object"}), '{"score": ' + "9" * 400 + "}", None),
        (Scale(schema={"type": "object"}), "[" * 100_000, None),
    ],
)
def test_scales(scale: Scale, answer: str, number: float | None) -> None:
    assert scale.read(answer) == number


@pytest.mark.parametrize(("answer", "number"), STATED.items())
def test_the_score_that_an_answer_states(answer: str, number: float | None) -> None:
    assert Scale().read(answer) == number


@pytest.mark.parametrize(
    "answer",
    ["score " * 10_000, "score:" + " " * 50_000 + "x", "<score>" * 10_000, "score a b c d e f " * 5_000],
)
def test_a_long_answer_is_read_in_no_time(answer: str) -> None:
    begun = time.monotonic()
    assert Scale().read(answer) is None
    assert time.monotonic() - begun < 2


@pytest.mark.parametrize(
    ("choice", "warning"),
    [
        (
            {"finish_reason": "length"},
            "the judge's answers are cut: raise max_tokens, which is 512; one ends in 'Score: 1'",
        ),
        ({"finish_reason": "content_filter"}, r"are not whole \(finish_reason 'content_filter'\)"),
        ({"finish_reason": "abort"}, r"are not whole \(finish_reason 'abort'\)"),
        ({"message": {"content": "Score: 1", "refusal": "No."}}, r"finish_reason 'refusal'"),
        (
            {"message": {"content": None, "reasoning_content": "Score: 1"}, "finish_reason": "stop"},
            "no number",
        ),
    ],
)
def test_an_answer_that_is_not_whole_has_no_score(choice: Any, warning: str, tmp_path: Path) -> None:
    answer = {"choices": [{"message": {"content": "Score: 1"}, **choice}]}
    with services.serve(lambda _: answer) as service:
        for _ in range(2):  # asked, and then read from the answers that are kept
            asked = Asked(tmp_path, **judge(tmp_path, service.url))
            with pytest.warns(UserWarning, match=warning):
                assert asked.scores() == [None, None, None]
            assert asked.logged["unreadable"] == 2
        assert len(service.requests) == 2


def test_a_scale_by_schema(tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"score": {"type": "integer", "maximum": 5}},
        "required": ["score"],
    }
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema))
    replies = {"a?": 'Sure:\n```json\n{"score": 4}\n```', "b?": '{"score": 6}'}

    def reply(body: Any) -> Any:
        assert body["response_format"] == {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema, "strict": True},
        }
        return said(replies[re.search(r"Question: (..)", body["messages"][0]["content"])[1]])  # type: ignore[index]

    with services.serve(reply) as service:
        asked = Asked(tmp_path, **judge(tmp_path, service.url, schema_file=str(file)))
        with pytest.warns(
            UserWarning, match=r"judge gpt-9.5: no number on the scale in the answer '{\"score\": 6}'"
        ):
            assert asked.scores() == [4.0, None, None]
        assert asked.logged["unreadable"] == 1


def test_a_resumed_run_asks_for_nothing_again_and_scores_the_same(tmp_path: Path) -> None:
    """Votes differ and calls fail at random; what went unanswered stays so in the repeated call, and only there."""
    random = np.random.default_rng(0)

    def reply(_: Any) -> Any:
        draw = random.random()
        return (500, b"", {}) if draw < 0.5 else said("hm" if draw < 0.7 else f"Score: {draw:.4f}")

    options: dict[str, Any] = {
        "votes": 3,
        "temperature": 0.7,
        "retries": 1,
        "on_error": "skip",
        "concurrency": 1,
    }
    with services.serve(reply) as service, warnings.catch_warnings():
        warnings.simplefilter("ignore")

        def begin() -> Any:
            return Asked(tmp_path, **judge(tmp_path, service.url, **options))

        asked = begin()
        first = [asked.scores(), asked.logged]
        kept = json.loads(json.dumps(asked.reward.snapshot()))
        second = [asked.scores(), asked.logged]
        assert first[1]["unanswered"] > second[1]["unanswered"]
        assert first[1]["unreadable"] > 0
        count = len(service.requests)

        asked = begin()
        assert [asked.scores(), asked.logged] == first
        asked = begin()
        asked.reward.restore(kept)
        assert [asked.scores(), asked.logged] == second
        assert len(service.requests) == count

        (broken, *_) = sorted((tmp_path / "answers").glob("??/*.json"))
        assert json.loads(broken.read_text())["request"]["model"] == "gpt-9.5"
        broken.write_text('{"answ')  # no crash leaves this, but disks do
        asked = begin()
        asked.scores()
        assert len(service.requests) > count
        # Another directory, such as another run's, has none of them.
        (tmp_path / "other").mkdir()
        asked = Asked(tmp_path / "other", **judge(tmp_path, service.url, **options))
        count = len(service.requests)
        asked.scores()
        assert len(service.requests) >= count + 6


def test_a_key_that_the_judge_repeats_is_in_no_file(tmp_path: Path) -> None:
    with services.serve(lambda _: said(f"Your key {KEY} scores: 4. Score: 5")) as service:
        assert Asked(tmp_path, **judge(tmp_path, service.url, api_key=KEY)).scores() == [5.0, 5.0, None]
        assert {key for _, key, _ in service.requests} == {f"Bearer {KEY}"}
    files = [path.read_text() for path in (tmp_path / "answers").glob("??/*.json")]
    assert len(files) == 2
    assert not any(KEY in text for text in files)


def test_a_judge_that_is_gone_is_a_warning_where_answers_are_kept(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_directory": str(tmp_path / "mine"), "retries": 0}
    with services.serve(lambda _: said("Score: 4")) as service:
        config = judge(tmp_path, service.url, **options)
        assert Asked(tmp_path / "one", **config).scores() == [4.0, 4.0, None]
    with pytest.warns(UserWarning, match="cannot reach"):
        assert Asked(tmp_path / "two", **config).scores() == [4.0, 4.0, None]
    with pytest.raises(InputError, match=r"^url: cannot reach .*/v1/models: .*; start the server"):
        Asked(tmp_path, **judge(tmp_path, service.url)).scores()


def test_warnings_of_a_judge_that_may_change_its_mind(tmp_path: Path) -> None:
    with services.serve(lambda _: said("Score: 1")) as service:
        for options, warning in (
            ({"temperature": "none"}, "temperature = none it may answer the same question in two ways"),
            ({"votes": 3}, "asks the same question 3 times"),
        ):
            with pytest.warns(UserWarning, match=warning):
                Asked(tmp_path, **judge(tmp_path, service.url, **options)).check()


def test_conversations_are_written_by_role(tmp_path: Path) -> None:
    seen: list[str] = []

    def reply(body: Any) -> Any:
        seen.append(body["messages"][0]["content"])
        return said("Score: 1")

    with services.serve(reply) as service:
        config = judge(tmp_path, service.url)
        (tmp_path / "rubric.txt").write_text("{prompt}|{completion}")
        asked = Asked(tmp_path, **config)
        chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi {completion}"}]
        call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
        asked.scores([chat, chat[1:]], [[call, *chat[1:]], [call]], answer=["A", "B"])
    assert sorted(seen) == [
        'Hi {completion}|[{"function": {"name": "add"}}]',
        'System:\nBe brief.\n\nUser:\nHi {completion}|Assistant:\n[{"function": {"name": "add"}}]\n\n'
        "User:\nHi {completion}",
    ]


def test_paths_and_names_of_a_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge's model is a name, though a directory is called so; the rubric is an input, kept answers are not."""
    (tmp_path / "pipe/gpt-4.1").mkdir(parents=True)
    (tmp_path / "pipe/kept").mkdir()
    (tmp_path / "pipe/rubric.txt").write_text("{completion}")
    (tmp_path / "pipe/prompts.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "pipe/pipeline.toml").write_text("""
dir = "run"
[[stage]]
name = "policy"
trainer = "grpo"
model = { model_type = "llama" }
train_data = "prompts.jsonl"
rewards = [
    { name = "judge", url = "http://h", model = "gpt-4.1", rubric_file = "rubric.txt", save_directory = "kept" },
    { name = "judge", label = "other", url = "http://h", model = "org/a/b", rubric_file = "rubric.txt" },
]
""")
    monkeypatch.chdir(tmp_path)
    (stage,) = identified_of("pipe/pipeline.toml", plugins.load())
    first, second = (reward.options for reward in stage.config.rewards)  # type: ignore[attr-defined]
    assert (first["model"], second["model"]) == ("gpt-4.1", "org/a/b")
    assert first["save_directory"] == str(tmp_path / "pipe/kept")
    assert first["rubric_file"] == str(tmp_path / "pipe/rubric.txt")
    assert {field for field in stage.record["inputs"] if field.startswith("rewards")} == {
        "rewards[0].rubric_file",
        "rewards[1].rubric_file",
    }
