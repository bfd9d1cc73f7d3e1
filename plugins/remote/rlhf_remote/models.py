"""Models behind a URL, for `rlhf generate`, `rlhf score` and `rlhf chat`: their names, completions and scores."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np

from rlhf_core import InputError, RunError
from rlhf_core.data.best_of_n import completion_lists
from rlhf_core.data.columns import kwargs_of, require_conversations, tools_of
from rlhf_core.data.prompts import as_prompts
from rlhf_core.errors import suggest
from rlhf_core.scoring import ScoredPart
from rlhf_core.workers.event_loop import run_async
from rlhf_remote.engines import NEUTRAL
from rlhf_remote.service import (
    REACH_SECONDS,
    RequestError,
    Service,
    address_problem,
    all_of,
    api_root,
    describe_answer,
    headers,
    json_bytes,
    listed,
    model_cards,
    reach,
    row_scores,
    score_request,
)
from rlhf_remote.transport import Answer, AnswerError, send_once

if TYPE_CHECKING:
    from rlhf_core.data import Records
    from rlhf_remote.generate import Generation

KEY = "RLHF_API_KEY"
"""Environment variable with the key that the commands send."""
ROWS = 256
"""Rows of a request for scores."""
READ = ("prompt", "completion", "messages", "chosen", "rejected", "tools", "chat_template_kwargs")
"""Columns that a request for scores sends."""
PROMPT = ("model", "prompt", "messages", "tools", "chat_template_kwargs")
"""Fields of a request for completions that make its prompt."""


@dataclass(frozen=True)
class Remote:
    """A model behind a URL. api: the address of the OpenAI-compatible routes. root: of the others, such as /score.

    context: tokens of the model's context, prompt and completion together; None where the server does not say.
    owner: the software that serves it, as far as the server says.
    """

    url: str
    api: str
    root: str
    name: str
    context: int | None = None
    service: Service = field(default_factory=Service)
    owner: str | None = None

    @property
    def neutral(self) -> dict[str, Any]:
        """Fields that keep a server from filling in what a request leaves out from the model's generation_config.json,
        so that flags have the defaults that they have with a directory. Servers of other kinds may not know them.
        """
        return dict(NEUTRAL) if self.owner in ("vllm", "sglang") else {}

    @property
    def headers(self) -> dict[str, str]:
        return headers(self.service.api_key)

    @classmethod
    def open(cls, url: str, kind: str, key: str | None = None) -> Remote:
        """Find the model that a URL means: the only one of its kind there, or the one named after "#".

        kind: "language_model" or "reward_model"; servers that say nothing about kinds are asked for any. key: what is
        sent; None: that of the environment. Raises InputError if the address, the key or the name is wrong.
        """
        problem = address_problem(url)
        if problem:
            raise InputError(problem.removeprefix("url: "))
        api = api_root(url)
        key = key or os.environ.get(KEY)
        wanted = httpx.URL(url).fragment
        answer = _models_answer(api, key)
        cards = model_cards(answer)
        if not cards and not wanted:
            raise InputError(f"{api}: lists no models ({describe_answer(answer)}); name one: {url}#NAME")
        name = _chosen(cards, wanted, kind, url)
        card = next((card for card in cards if card["id"] == name), {})
        context, owner = card.get("max_model_len"), card.get("owned_by")
        context = context if isinstance(context, int) and not isinstance(context, bool) else None
        owner = owner if isinstance(owner, str) else None
        return cls(url, api, api.removesuffix("/v1"), name, context, Service(key), owner)


def _models_answer(api: str, key: str | None) -> Answer:
    """Ask a server for its models. Raises InputError where it is not there, or does not accept the key."""
    answer = reach(f"{api}/models", key)
    if isinstance(answer, str):
        raise InputError(f"{answer}; start the server, or correct the address")
    if answer.status_code in (401, 403):
        hint = "the key is not accepted; correct" if key else "export the key as"
        raise InputError(f"{api}: {describe_answer(answer)}; {hint} {KEY}")
    return answer


def _chosen(cards: Sequence[Mapping[str, Any]], wanted: str, kind: str, url: str) -> str:
    """Choose a model by its name, which may be empty, and its kind. Raises InputError where none or several fit."""
    api = api_root(url)
    names = [str(card["id"]) for card in cards]
    fitting = [str(card["id"]) for card in cards if card.get("kind", kind) == kind]
    if wanted and names and wanted not in names:
        raise InputError(f"{api} has no model '{wanted}'.{suggest(wanted, names)} It has {listed(names)}")
    if wanted in names and wanted not in fitting:
        raise InputError(
            f"{api}: '{wanted}' is not a {kind.replace('_', ' ')}; such are: {listed(fitting) or 'none'}"
        )
    if not wanted and len(fitting) != 1:
        of_kind = f"{len(fitting)} models of kind {kind}" if fitting else f"no {kind.replace('_', ' ')}"
        raise InputError(f"{api} has {of_kind}: {listed(fitting or names)}; name one: {url}#NAME")
    return wanted or fitting[0]


def refuse_flags(flags: Mapping[str, Any]) -> None:
    """Raise InputError for flags, {flag: its value}, that concern a model's files."""
    given = [flag for flag, value in flags.items() if value]
    if given:
        raise InputError(*(f"{flag}: has no effect on a model behind a URL; leave it out" for flag in given))


def takes_chats(remote: Remote) -> bool:
    """Ask whether a model has a chat template, by tokenizing a chat; yes of a server that does not say."""
    body = {"model": remote.name, "messages": [{"role": "user", "content": "Hi"}]}
    try:
        answer = send_once(
            "POST", f"{remote.root}/tokenize", remote.headers, json_bytes(body), seconds=REACH_SECONDS
        )
    except AnswerError:
        return True
    return answer.status_code != 400


def _for_template(records: Records, i: int) -> tuple[list[Any] | None, dict[str, Any] | None]:
    """Read the tools and the template's variables of a row. Raises InputError, which names the row."""
    try:
        return tools_of(records[i]), kwargs_of(records[i])
    except InputError as error:
        raise InputError(f"{records.where(i)}: {error}") from None


def complete(given: Generation, records: Records) -> list[dict[str, Any]]:
    """Complete the prompts of `rlhf generate`: their rows with `completion` and `finished`.

    given: its arguments and flags. Conversations, and texts of --prompt for a model with a chat template, are sent to
    /v1/chat/completions, other texts to /v1/completions. Of row i the seed is given.seed + i.
    """
    refuse_flags(
        {
            "--base": given.base,
            "--chat_template": given.chat_template,
            "--max_prompt_length": given.max_prompt_length,
            "--quantize": given.quantize,
        }
    )
    remote = Remote.open(given.model, "language_model")
    read = as_prompts(records)
    prompts = _prompts(given, read, remote)
    for_template = [_for_template(read, i) for i in range(len(prompts))]
    settings = _settings(given)

    async def ask(i: int) -> list[dict[str, Any]]:
        body = {"model": remote.name, **remote.neutral, **settings, "seed": (given.seed + i) % 2**32}
        if isinstance(prompts[i], str):
            route, body = "completions", {**body, "prompt": prompts[i]}
        else:
            route = "chat/completions"
            body = {**body, **_chat(given, prompts[i], *for_template[i])}
        body["max_tokens"] = await room(remote, body)
        try:
            choices, _ = await remote.service.post(
                f"{remote.api}/{route}", body, lambda answer: _choices(answer, given.num_generations)
            )
        except RequestError as error:
            raise _at_place(read.where(i), error) from None
        return [{**records[i], **choice} for choice in choices]

    async def ask_all() -> list[list[dict[str, Any]]]:
        return await all_of(map(ask, range(len(prompts))))

    return [row for rows in run_async(ask_all()) for row in rows]


def _prompts(given: Generation, read: Records, remote: Remote) -> list[Any]:
    """Return the texts and conversations to complete. Raises InputError for rows that have neither."""
    prompts: list[Any] = [row.get("prompt") for row in read]
    if given.file is None and not given.raw and takes_chats(remote):
        prompts = [[{"role": "user", "content": text}] for text in prompts]
    elif given.system is not None:
        require_conversations(read.tables, "--system")
    problems = [
        f"{read.where(i)}: has no prompt, as text or a list of messages"
        for i, prompt in enumerate(prompts)
        if not prompt or not isinstance(prompt, str | list)
    ]
    if problems:
        raise InputError(*problems[:5])
    return prompts


def _chat(
    given: Generation,
    messages: list[dict[str, Any]],
    tools: list[Any] | None,
    own_kwargs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return what a request for a chat says of the conversation. tools, own_kwargs: of its row."""
    if given.system is not None and messages[0].get("role") != "system":
        messages = [{"role": "system", "content": given.system}, *messages]
    kwargs = {**(given.chat_template_kwargs or {}), **(own_kwargs or {})}
    body: dict[str, Any] = {"messages": messages}
    if tools:
        body["tools"] = tools
    if kwargs:
        body["chat_template_kwargs"] = kwargs
    return body


async def room(remote: Remote, body: Mapping[str, Any]) -> int:
    """Return the tokens that a request asks for, at most those that the model's context leaves after its prompt."""
    most: int = body["max_tokens"]
    count = await prompt_tokens(remote, body)
    if count is None or remote.context is None or count >= remote.context:
        return most
    return min(most, remote.context - count)


async def prompt_tokens(remote: Remote, body: Mapping[str, Any]) -> int | None:
    """Ask how many tokens a request's prompt has; None where it fits with all that it asks for, or nobody says."""
    asked = {name: body[name] for name in PROMPT if name in body}
    # A token has a byte or more.
    if remote.context is None or len(json_bytes(asked)) + body["max_tokens"] <= remote.context:
        return None
    try:
        count, _ = await remote.service.post(f"{remote.root}/tokenize", asked, _count)
    except (RequestError, RunError):
        # There is no such route, or the server says what is wrong with the request itself.
        return None
    return count


def _count(answer: Any) -> int:
    """Read the answer of /tokenize."""
    count = answer.get("count") if isinstance(answer, Mapping) else None
    if not isinstance(count, int) or isinstance(count, bool):
        raise ValueError("a count of tokens")
    return count


def _settings(given: Generation) -> dict[str, Any]:
    """Return the fields of a request; those that OpenAI's own API lacks only where they do something."""
    fields: dict[str, Any] = {
        "max_tokens": given.max_completion_length,
        "temperature": given.temperature,
        "top_p": given.top_p,
        "n": given.num_generations,
    }
    extensions = {"top_k": given.top_k, "min_p": given.min_p, "stop_token_ids": given.stop_token_ids}
    fields |= {name: value for name, value in extensions.items() if value}
    if given.repetition_penalty != 1:
        fields["repetition_penalty"] = given.repetition_penalty
    if given.stop_strings:
        fields |= {"stop": list(given.stop_strings), "include_stop_str_in_output": True}
    return fields


def _choices(answer: Any, count: int) -> list[dict[str, Any]]:
    """Return `completion`, `finished` and, where there are any, `tool_calls` of each choice, in order."""
    try:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        numbers = [choice["index"] for choice in choices]
        rows = []
        for choice in choices:
            message = choice.get("message") or {"content": choice.get("text")}
            calls = message.get("tool_calls")
            content = message.get("content") or ""
            if not isinstance(content, str):
                raise TypeError
            rows.append(
                {
                    "completion": content,
                    "finished": choice.get("finish_reason") in ("stop", "tool_calls"),
                    **({"tool_calls": calls} if calls else {}),
                }
            )
    except (LookupError, TypeError, AttributeError):
        raise ValueError(f"{count} choices") from None
    if numbers != list(range(count)):
        raise ValueError(f"{count} choices, numbered from 0")
    return rows


def _at_place(place: str, error: RequestError) -> Exception:
    """Make the error that ends a command: of bad input where the server refused it."""
    message = f"{place}: {error}"
    return InputError(message) if error.refused else RunError(f"{message}; rerun the command once it answers")


class RemoteScorer:
    """What `rlhf score` uses of a `Scorer`, asking a server's `/score`."""

    layout: Mapping[str, Any] = {}
    encoder = None

    def __init__(self, remote: Remote) -> None:
        self.remote = remote
        self.model = self
        self.contract = self
        self.source = None

    def to_dict(self) -> dict[str, Any]:
        """Return what decides the scores besides the command's arguments."""
        return {"model": self.remote.name}

    def snapshot(self) -> dict[str, Any]:
        """Return nothing: the server keeps what its last bits depend on."""
        return {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Do nothing."""

    def score_parts(
        self, records: Records, *, prompt_repeated: bool | None = None, skip: int = 0
    ) -> Iterator[ScoredPart]:
        """Score ROWS rows at a time. skip: parts scored earlier. Raises InputError for rows that the server refuses."""
        refuse_flags({"--prompt_repeated": prompt_repeated is not None})
        if any(map(completion_lists, records.tables)):
            raise InputError(
                f"{records.name}: a server scores no lists of completions; give the model's directory"
            )
        for start in range(skip * ROWS, len(records), ROWS):
            rows = records[start : start + ROWS]
            body = score_request(self.remote.name, {name: [row.get(name) for row in rows] for name in READ})
            url = f"{self.remote.root}/score"
            places = [records.where(start + i) for i in range(len(rows))]
            try:
                scores, _ = run_async(self.remote.service.post(url, body, partial(row_scores, len(rows))))
            except RequestError as error:
                raise _at_place(
                    f"{places[0]} and the next {len(rows) - 1}" if rows[1:] else places[0], error
                ) from None
            table = {name: np.array(values, np.float64) for name, values in scores.items()}
            unread = [place for i, place in enumerate(places) if any(np.isnan(x[i]) for x in table.values())]
            yield ScoredPart(table, unread)


def open_scorer(url: str, *, normalize: bool = False, base: str | None = None) -> RemoteScorer:
    """Open the scorer of `rlhf score` for a URL."""
    refuse_flags({"--normalize": normalize, "--base": base})
    return RemoteScorer(Remote.open(url, "reward_model"))
