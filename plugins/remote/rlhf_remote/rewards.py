"""The rewards `http`, a service that scores completions, and `judge`, a language model that is asked about each."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field

from rlhf_core import InputError, RunError
from rlhf_core.config.durations import Seconds
from rlhf_core.errors import suggest
from rlhf_core.hidden import scrub_all
from rlhf_remote.answers import Answers, has_answers, question_key
from rlhf_remote.rubric import Rubric, Scale, read_schema
from rlhf_remote.service import (
    RequestError,
    Service,
    address_problem,
    all_of,
    api_root,
    describe_answer,
    is_number,
    listed,
    model_cards,
    reach,
    row_scores,
    score_request,
)
from rlhf_remote.transport import LONGEST_SHOWN, MOST_BYTES, shorten

if TYPE_CHECKING:
    from rlhf_core import Stage

FINISHED = (None, "stop", "eos", "eos_token", "stop_sequence", "end_turn")
"""Values of `finish_reason` of an answer that is whole; some servers give none."""
STOPS = (
    'rerun the same command to resume once it answers, or set the reward\'s on_error = "skip" to leave such '
    "completions unscored"
)
LARGEST_SCORE = float(np.finfo(np.float32).max)
Log = Callable[[str, float], None]
Positive = Annotated[int, Field(ge=1)]
Limit = Annotated[Seconds, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]


@dataclass
class Http:
    """Ask a service for the scores of completions: POST {prompts, completions, columns} → {scores}.

    url: the service's address. model: a reward model of `rlhf serve`, whose /score has a form of its own.
    columns: those sent along, {name: [values]}. batch_size: completions of a request.
    concurrency: requests at a time. request_timeout: seconds that one may take. retries: of a failed request, with
    growing pauses. api_key: sent as `Authorization: Bearer …`. on_error: the reward's, see the trainer.
    max_answer_bytes: of an answer; a longer one is not read.

    With `on_error = "skip"`, completions of a request that fails are not scored, and those of others are.
    """

    costs: ClassVar[bool] = True
    url: str
    columns: tuple[str, ...] = ()
    batch_size: Positive = 32
    concurrency: Positive = 8
    request_timeout: Limit = 60.0
    retries: Count = 4
    api_key: str | None = None
    on_error: Literal["stop", "skip"] = "stop"
    model: str | None = None
    max_answer_bytes: Positive = MOST_BYTES
    _service: Service = field(init=False, repr=False)
    _reached: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        problem = address_problem(self.url)
        if problem:
            raise ValueError(problem)
        self._service = Service(
            self.api_key, self.concurrency, self.request_timeout, self.retries, self.max_answer_bytes
        )

    def check(self, columns: Mapping[str, Sequence[Any]]) -> Mapping[int, str]:
        """Raise InputError for columns that there are not, and where the service cannot be reached; it gets no data."""
        problems = [
            f"columns: there is no column '{name}'.{suggest(name, columns)} Columns: {', '.join(columns) or 'none'}"
            for name in self.columns
            if name not in columns
        ]
        if not self._reached:
            answer = reach(self.url, self.api_key)
            if isinstance(answer, str):
                problems.append(f"url: {answer}; start the service, or correct the address")
            elif answer.status_code in (401, 403):
                problems.append(f"url: {self.url}: {describe_answer(answer)}; {_key_hint(self.api_key)}")
            else:  # it need not answer a GET
                self._reached = True
        if problems:
            raise InputError(*problems)
        return {}

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], log_metric: Log, **columns: Any
    ) -> list[Any]:
        """Return the service's scores, None for completions that it does not score."""
        count = len(completions)
        size = self.batch_size
        batches = [range(start, min(start + size, count)) for start in range(0, count, size)]

        async def ask(rows: range) -> tuple[list[Any] | None, int]:
            sent = {name: [columns[name][i] for i in rows] for name in self.columns}
            texts = ([prompts[i] for i in rows], [completions[i] for i in rows])
            if self.model is None:
                body = {"prompts": texts[0], "completions": texts[1], "columns": sent}
                read = partial(_scores, len(rows))
            else:
                body = score_request(self.model, {"prompt": texts[0], "completion": texts[1], **sent})
                read = partial(_score_values, len(rows))
            try:
                return await self._service.post(self.url, body, read)
            except RequestError as error:
                if self.on_error == "stop":
                    raise RunError(f"{error}; {STOPS}") from error
                return None, error.failures

        answers = await all_of(map(ask, batches))
        log_metric("failed_requests", sum(failures for _, failures in answers))
        values: list[Any] = []
        unanswered = 0
        for rows, (scores, _) in zip(batches, answers, strict=True):
            if scores is None:
                unanswered += len(rows)
                scores = [None] * len(rows)
            values += scores
        log_metric("unanswered", unanswered)
        return values


class Vote(NamedTuple):
    """One answer: its number, None where it has none. unreadable: answers without one, this one included."""

    number: float | None
    failures: int
    unreadable: int
    answered: bool = True


@dataclass
class Judge:
    """Ask a language model behind an OpenAI-compatible API about every completion, and read a number in its answer.

    url: the API's address, such as https://api.openai.com/v1. model: its name there.
    rubric_file: the question, with {prompt}, {completion} and {COLUMN}.
    pattern: regular expression whose last match is the number, or whose first group is; default: where the answer names
    its score, as in "Score: 7". What can be read in two ways counts as unreadable, as do thoughts and cut answers.
    schema_file: JSON schema of the answer, asked for as `response_format`; the number is its property `score_field`.
    scale: the smallest and the largest number; others count as unreadable. words: {what the match may be: its number}.
    votes: questions about one completion, whose numbers are averaged. temperature: "none": the server's.
    max_tokens: of an answer; "none": the server's. request: more fields of the request, such as {"top_p": 0.9}.
    save_directory: where answers are kept; none: in the stage's directory.
    concurrency, request_timeout, retries, api_key, on_error, max_answer_bytes: as for `http`.

    A completion is not scored if no answer has a number, or if a column of the rubric is null; with
    `on_error = "skip"`, also if there is no answer.
    """

    costs: ClassVar[bool] = True
    url: str
    model: str
    rubric_file: str
    pattern: str | None = None
    schema_file: str | None = None
    score_field: str = "score"
    scale: tuple[float, float] | None = None
    words: dict[str, float] | None = None
    votes: Positive = 1
    temperature: Annotated[float, Field(ge=0)] | Literal["none"] = 0.0
    max_tokens: Positive | Literal["none"] = 512
    request: dict[str, Any] | None = None
    save_directory: str | None = None
    concurrency: Positive = 8
    request_timeout: Limit = 120.0
    retries: Count = 4
    api_key: str | None = None
    on_error: Literal["stop", "skip"] = "stop"
    max_answer_bytes: Positive = MOST_BYTES

    def __post_init__(self) -> None:
        problem = address_problem(self.url)
        if problem:
            raise ValueError(problem)
        if self.pattern is not None and self.schema_file is not None:
            raise ValueError("pattern and schema_file both say how to read an answer; leave one out")
        low, high = self.scale or (-math.inf, math.inf)
        if not low < high:
            raise ValueError(f"scale: the first number must be below the second; got {low:g} and {high:g}")
        try:
            pattern = None if self.pattern is None else re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern: '{self.pattern}' is not a regular expression: {error}") from None
        schema = None if self.schema_file is None else read_schema(self.schema_file, self.score_field)
        self._scale = Scale(low, high, self.words, pattern, schema, self.score_field)
        self._rubric = Rubric.read(self.rubric_file)
        self._service = Service(
            self.api_key, self.concurrency, self.request_timeout, self.retries, self.max_answer_bytes
        )
        self._url = f"{api_root(self.url)}/chat/completions"
        self._answers: Answers | None = None
        self._call = 0
        self._checked = False
        self._warned: set[str] = set()

    @property
    def _repeatable(self) -> bool:
        return self.temperature == 0 and not (self.request or {}).get("temperature")

    def _directory(self, stage: Stage) -> Path:
        return Path(self.save_directory).expanduser() if self.save_directory else stage.dir / "answers"

    def check(self, columns: Mapping[str, Sequence[Any]], stage: Stage) -> Mapping[int, str]:
        """Raise InputError for a rubric with other names than columns, and where the API lacks the model.

        An API that cannot be reached is a warning where answers are kept already: a resumed run may need no others.
        """
        self._rubric.check(columns)
        if not self._checked:
            problem, reached = self._problem_of_api()
            if problem and (reached or not has_answers(self._directory(stage))):
                raise InputError(problem)
            if problem:
                warnings.warn(f"{problem}; answers are kept in {self._directory(stage)}", stacklevel=2)
            self._checked = True
            if not self._repeatable:
                warnings.warn(
                    f"judge {self.model}: temperature = {self.temperature}"
                    " it may answer the same question in two ways. Its answers are kept in "
                    f"{self._directory(stage)}, so a resumed run has the same rewards, and a new run others",
                    stacklevel=2,
                )
            elif self.votes > 1:
                warnings.warn(
                    f"judge {self.model}: votes = {self.votes} at temperature 0 asks the same question "
                    f"{self.votes} times; set a temperature",
                    stacklevel=2,
                )
        return {}

    def _problem_of_api(self) -> tuple[str | None, bool]:
        """Return (what is wrong with the address, the key or the model, whether the API answered)."""
        root = api_root(self.url)
        answer = reach(f"{root}/models", self.api_key)
        if isinstance(answer, str):
            return f"url: {answer}; start the server, or correct the address", False
        if answer.status_code in (401, 403):
            return f"url: {root}: {describe_answer(answer)}; {_key_hint(self.api_key)}", True
        known = [str(card["id"]) for card in model_cards(answer)]
        if not known or self.model in known or any(name.endswith(f"/{self.model}") for name in known):
            return None, True  # some APIs list no models
        return (
            f"model: {root} has no model '{self.model}'.{suggest(self.model, known)} It has {listed(known)}",
            True,
        )

    def setup(self, stage: Stage) -> None:
        """Open the directory of kept answers."""
        self._answers = Answers(self._directory(stage), stage.dir)

    def snapshot(self) -> dict[str, Any]:
        """Return the number of calls so far, by which a resumed run knows what went unanswered."""
        return {"calls": self._call}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Restore a `snapshot`."""
        self._call = int(kept["calls"])

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], log_metric: Log, **columns: Any
    ) -> list[float | None]:
        """Return the mean of the numbers in each completion's answers."""
        keys: list[list[str]] = []
        questions: dict[str, tuple[Mapping[str, Any], int]] = {}  # completions may have the same ones
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            own: list[str] = []
            keys.append(own)
            body = self._body(prompt, completion, {name: columns[name][i] for name in self._rubric.columns()})
            if body is None:
                continue
            for vote in range(self.votes):
                key = question_key(body, vote)
                own.append(key)
                questions[key] = body, vote
        self._call += 1
        asked = [self._vote(self._call, key, body, vote) for key, (body, vote) in questions.items()]
        votes = await all_of(asked)
        by_key = dict(zip(questions, votes, strict=True))
        log_metric("failed_requests", sum(each.failures for each in votes))
        log_metric("unreadable", sum(each.unreadable for each in votes))
        log_metric("unanswered", sum(not each.answered for each in votes))
        values: list[float | None] = []
        for own in keys:
            answers = [by_key[key].number for key in own]
            numbers = [number for number in answers if number is not None]
            values.append(sum(numbers) / len(numbers) if numbers else None)
        return values

    def _body(self, prompt: Any, completion: Any, columns: Mapping[str, Any]) -> dict[str, Any] | None:
        """Make a request; None where a column is null."""
        if any(value is None or value != value for value in columns.values()):
            return None
        text = self._rubric.fill({"prompt": prompt, "completion": completion, **columns})
        body: dict[str, Any] = {"model": self.model, "messages": [{"role": "user", "content": text}]}
        if self.temperature != "none":
            body["temperature"] = self.temperature
        if self.max_tokens != "none":
            body["max_tokens"] = self.max_tokens
        if self._scale.schema is not None:
            schema = {"name": "answer", "schema": self._scale.schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return {**body, **(self.request or {})}

    async def _vote(self, call: int, key: str, body: Mapping[str, Any], vote: int) -> Vote:
        """Return the kept answer to a question, or ask it; an unreadable answer is asked for again if that can help."""
        answers = self._answers
        if answers is None:
            raise RuntimeError("call setup(stage) before the first call")
        record = answers.get(key)
        noted = answers.failures(call, key)
        if noted is not None:
            return Vote(None, noted, 0, answered=False)
        if record is None:
            try:
                record = await self._ask(body)
            except RequestError as error:
                if self.on_error == "stop":
                    raise RunError(f"{error}; {STOPS}") from error
                answers.note_unanswered(call, key, error.failures)
                return Vote(None, error.failures, 0, answered=False)
            record = scrub_all({"request": body, "vote": vote, **record})  # a server may repeat the key
            await answers.keep(key, record)
        number = self._read(record["answer"], record.get("finish_reason"))
        if number is None:
            self._warn_of_unreadable(record["answer"], record.get("finish_reason"))
        return Vote(number, record["failures"], int(record.get("unreadable", 0)) + (number is None))

    def _read(self, answer: str, finish_reason: str | None) -> float | None:
        """Return the number in an answer, None if it has none or is not whole: a part of a number looks like one."""
        return self._scale.read(answer) if finish_reason in FINISHED else None

    async def _ask(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Ask until an answer has a number: {answer, finish_reason, failures, unreadable}, the last two before it."""
        failures = 0
        unreadable = 0
        tries = 1 if self._repeatable else 1 + self.retries
        while True:
            try:
                (text, finish_reason), failed = await self._service.post(self._url, body, _message)
            except RequestError as error:
                raise RequestError(str(error), failures + error.failures) from None
            failures += failed
            if self._read(text, finish_reason) is not None or unreadable + 1 == tries:
                return {
                    "answer": text,
                    "finish_reason": finish_reason,
                    "failures": failures,
                    "unreadable": unreadable,
                }
            unreadable += 1

    def _warn_of_unreadable(self, answer: str, finish_reason: str | None) -> None:
        """Warn once of answers that are cut, and once of others without a number."""
        if finish_reason == "length":
            problem = (
                f"the judge's answers are cut: raise max_tokens, which is {self.max_tokens}; one ends in"
            )
            shown = answer[-LONGEST_SHOWN:]
        elif finish_reason not in FINISHED:
            problem = f"the judge's answers are not whole (finish_reason {finish_reason!r}), such as"
            shown = answer
        else:
            problem, shown = "no number on the scale in the answer", answer
        kind = problem.partition(":")[0]
        if kind in self._warned:
            return
        self._warned.add(kind)
        warnings.warn(
            f"judge {self.model}: {problem} {shorten(shown)!r}; such completions are not scored. The metric "
            "rewards/NAME/unreadable counts these answers",
            stacklevel=2,
        )


def _scores(count: int, answer: Any) -> list[float | None]:
    scores = answer.get("scores") if isinstance(answer, Mapping) else None
    if not isinstance(scores, list) or len(scores) != count or not all(map(_is_score, scores)):
        raise ValueError(f'{{"scores": [{count} numbers or nulls]}}')
    return scores


def _score_values(count: int, answer: Any) -> list[float | None]:
    scores = row_scores(count, answer).get("score")
    if scores is None or not all(math.isnan(score) or _is_score(score) for score in scores):
        raise ValueError(f"data with one score for each of {count} rows")
    return [None if math.isnan(score) else score for score in scores]


def _is_score(value: Any) -> bool:
    return value is None or (is_number(value) and abs(value) <= LARGEST_SCORE)


def _message(answer: Any) -> tuple[str, str | None]:
    """Return the text of a chat completion, empty where there is none, and why it ended; "refusal" for a refusal."""
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        finish_reason = choice.get("finish_reason")
        content, refusal = message.get("content"), message.get("refusal")
    except (LookupError, TypeError, AttributeError):
        raise ValueError("a chat completion") from None
    if finish_reason is not None:
        finish_reason = str(finish_reason)
    return content if isinstance(content, str) else "", "refusal" if refusal else finish_reason


def _key_hint(api_key: str | None) -> str:
    wrong = "the key is not accepted" if api_key else "it needs a key"
    return f'{wrong}: give api_key = {{ env = "NAME" }}, and export NAME=…'
