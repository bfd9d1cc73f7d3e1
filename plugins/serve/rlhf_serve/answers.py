"""Requests to completions, and completions to the JSON that OpenAI's and vLLM's clients expect."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
from rlhf_http.answers import usage
from rlhf_http.fields import BadRequest, Completion, Generate, Sampling, refuse_ignored, require_short

from rlhf_core.sampling.turns import STOP_IDS
from rlhf_serve.pending import CONTEXT, GenerationParams, PendingCompletion, TextReader

if TYPE_CHECKING:
    from rlhf_core.contracts import Weights
    from rlhf_serve.engine import Engine
    from rlhf_serve.opening import ServedPolicy

SHORTEST_TEMPERATURE = 1e-4
"""Temperatures between 0 and this one are this one: beyond it logits overflow, and the likeliest token is sampled."""
DEFAULT_TOKENS = 16
"""The most tokens of a completion that does not say, as in OpenAI's."""
_numbers = count()


@dataclass
class NamedModel:
    """What a request's model name means: a policy, and the weights of the policy or of one of its adapters."""

    name: str
    served: ServedPolicy
    weights: Weights


@dataclass(eq=False)
class SampledRequest:
    """A request whose completions are sampled. prompts: ids of each. n: completions of each."""

    id: str
    target: NamedModel
    prompts: list[np.ndarray]
    n: int
    completions: list[PendingCompletion] = field(default_factory=list)
    created: int = field(default_factory=lambda: int(time.time()))
    began: float = field(default_factory=time.monotonic)
    only_prompt: bool = False
    """Whether nothing of the completions is reported: `max_tokens` is 0."""

    def prompt_of(self, pending: PendingCompletion) -> int:
        return pending.index // self.n

    def usage(self) -> dict[str, int]:
        """Count the tokens so far."""
        read = sum(map(len, self.prompts))
        written = 0 if self.only_prompt else sum(len(pending.tokens) for pending in self.completions)
        return usage(read, written)


def make_generation_params(
    body: Sampling, target: NamedModel, limit: int, likeliest: int | None
) -> GenerationParams:
    """Complete what a request asks of its completions. Raises BadRequest for what cannot be done."""
    own = () if body.ignore_eos else target.served.end_ids
    given = tuple(body.stop_token_ids or ())
    size = target.served.vocab_size
    unknown = [i for i in given if i >= size]
    if unknown:
        raise BadRequest(
            f"stop_token_ids: {unknown[0]} is out of range (vocab_size {size})", param="stop_token_ids"
        )
    stop_ids = tuple(dict.fromkeys((*own, *given)))
    if len(stop_ids) > STOP_IDS:
        raise BadRequest(
            f"stop_token_ids: with the model's own {len(own)} they are {len(stop_ids)}; {STOP_IDS} are possible",
            param="stop_token_ids",
        )
    temperature = 1.0 if body.temperature is None else body.temperature
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return GenerationParams(
        limit=limit,
        temperature=max(temperature, SHORTEST_TEMPERATURE) if temperature else 0.0,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k if body.top_k and body.top_k > 0 else None,
        min_p=body.min_p or 0.0,
        seed=int.from_bytes(os.urandom(8), "little") if body.seed is None else body.seed,
        stop=stop,
        stop_ids=stop_ids,
        end_ids=tuple(own),
        likeliest=likeliest,
        keeps_stop=body.include_stop_str_in_output,
        skips_special=body.skip_special_tokens,
    )


def room(target: NamedModel, prompts: Sequence[np.ndarray], wanted: int | None, name: str) -> int:
    """Return the most tokens of a completion. Raises BadRequest where a prompt, or a completion after it, does not fit.

    wanted: what the request asks for in its field `name`; None: all that fits.
    """
    length = target.served.length
    for number, prompt in enumerate(prompts):
        where = "the prompt" if len(prompts) == 1 else f"prompt {number}"
        if len(prompt) == 0:
            raise BadRequest(f"{where} has no tokens", param="prompt")
        if len(prompt) >= length:
            raise BadRequest(
                f"{where} has {len(prompt):,} tokens; with at least one of the completion it must fit the model's "
                f"context of {length:,}",
                param="prompt",
            )
    longest = max(map(len, prompts))
    if wanted is not None and longest + wanted > length:
        raise BadRequest(
            f"{name}: {wanted:,} tokens after a prompt of {longest:,} do not fit the model's context of {length:,}; "
            f"ask for at most {length - longest:,}",
            param=name,
        )
    return wanted if wanted is not None else length - longest


def check_ids(ids: Sequence[int], target: NamedModel, name: str = "prompt") -> np.ndarray:
    """Make an array of token ids. Raises BadRequest for one that the model does not have."""
    size = target.served.vocab_size
    array = np.asarray(ids, np.int64)
    if array.size and array.max() >= size:
        raise BadRequest(f"{name}: token id {array.max()} is out of range (vocab_size {size})", param=name)
    return array.astype(np.int32)


def too_many(count: int, most: int) -> BadRequest:
    """Refuse a request for more completions than a server takes at all."""
    return BadRequest(f"n: {count:,} completions of one request are more than {most:,}", param="n")


def encode_prompts(body: Completion, target: NamedModel, most: int) -> list[np.ndarray]:
    """Encode the prompts of a request for completions, int32 [n] each. Raises BadRequest.

    most: completions that the server takes.
    """
    given = body.prompt
    is_one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
    rows: list[Any] = [given] if is_one else list(given)
    if not rows:
        raise BadRequest("prompt: is empty", param="prompt")
    count = len(rows) * (body.n or 1)
    if count > most:
        raise too_many(count, most)
    if isinstance(rows[0], str):
        for text in rows:
            require_short([text], target.served.length, "prompt")
        if body.add_special_tokens is False:
            prompts = target.served.encoder.tokenize_open([(text, False) for text in rows])
        else:
            prompts = target.served.encoder.prompts(rows)
    else:
        prompts = [check_ids(ids, target) for ids in rows]
    if body.truncate_prompt_tokens:
        prompts = [prompt[-body.truncate_prompt_tokens :] for prompt in prompts]
    return prompts


@dataclass
class Prepared:
    """A request whose completions can begin."""

    id: str
    target: NamedModel
    prompts: list[np.ndarray]
    n: int
    generation: GenerationParams
    continues_text: bool = True
    """Whether the completions go on with the prompt's text; else they are texts of their own, as a chat's replies."""
    reads_prompt: bool = False
    per_token: bool = False
    """Whether the text after every token is wanted."""
    streams: bool = False
    """Whether the text is sent while it grows."""
    only_prompt: bool = False

    @property
    def count(self) -> int:
        """The number of its completions."""
        return len(self.prompts) * self.n

    def take_off(self, engine: Engine) -> SampledRequest:
        """Begin its completions."""
        policy = self.target.served.policy
        call = SampledRequest(self.id, self.target, self.prompts, self.n, only_prompt=self.only_prompt)
        for number, prompt in enumerate(self.prompts):
            context = prompt[-CONTEXT:].tolist() if self.continues_text else []
            call.completions += [
                PendingCompletion(
                    number=next(_numbers),
                    prompt=prompt,
                    generation=self.generation,
                    index=number * self.n + k,
                    weights=self.target.weights,
                    reader=TextReader(self.target.served.tokenizer, context, self.generation.skips_special),
                    end=lambda pending: engine.end(policy, pending),
                    group=None if self.reads_prompt else (self.target.weights.number, prompt.tobytes()),
                    reads_prompt=self.reads_prompt,
                    per_token=self.per_token or self.generation.likeliest is not None,
                    streams=self.streams,
                )
                for k in range(self.n)
            ]
        engine.begin(policy, call.completions)
        return call


def prepare_completions(body: Completion, target: NamedModel, most: int) -> Prepared:
    """Encode and check a request for completions. most: that the server takes. Raises BadRequest."""
    refuse_ignored(body)
    n = body.n or 1
    if body.best_of not in (None, n):
        raise BadRequest("best_of: only the value of n is supported; leave the field out", param="best_of")
    prompts = encode_prompts(body, target, most)
    wanted = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    if wanted == 0 and not body.echo:
        raise BadRequest("max_tokens: must be at least 1, except with echo", param="max_tokens")
    limit = room(target, prompts, wanted, "max_tokens")
    generation = make_generation_params(body, target, max(limit, 1), body.logprobs)
    reads = body.prompt_logprobs is not None or bool(body.echo and body.logprobs is not None)
    name = body.request_id or f"cmpl-{uuid.uuid4().hex}"
    return Prepared(
        name,
        target,
        prompts,
        n,
        generation,
        reads_prompt=reads,
        streams=bool(body.stream),
        only_prompt=wanted == 0,
    )


def token_text(call: SampledRequest, token: int, as_id: bool) -> str:
    """Return how a token is written in log-probabilities."""
    if as_id:
        return f"token_id:{token}"
    return call.target.served.token_bytes(token).decode(errors="replace")


def completion_logprobs(
    body: Completion, call: SampledRequest, pending: PendingCompletion, start: int, end: int
) -> dict[str, Any]:
    """Write the log-probabilities of tokens `start` to `end`, as OpenAI's completions have them."""
    as_id = bool(body.return_tokens_as_token_ids)
    most = body.logprobs or 0
    top: list[dict[str, float] | None] = []
    for i in range(start, end):
        ids, logps = pending.likeliest[i] if most else ([], [])
        row = {token_text(call, token, as_id): finite(logp) for token, logp in zip(ids, logps, strict=True)}
        top.append({token_text(call, pending.tokens[i], as_id): finite(pending.logps[i]), **row})
    offsets = [0, *pending.text_ends]
    return {
        "text_offset": offsets[start:end],
        "token_logprobs": [finite(logp) for logp in pending.logps[start:end]],
        "tokens": [token_text(call, token, as_id) for token in pending.tokens[start:end]],
        "top_logprobs": top,
    }


def finite(logp: float) -> float:
    """Write a log-probability as JSON can: -inf is a very small number, as vLLM's."""
    return max(float(logp), -9999.0)


def versions(pending: PendingCompletion) -> list[dict[str, Any]]:
    """Write which weights sampled which tokens."""
    return [{"version": version, "start": start, "end": end} for version, start, end in pending.versions]


def completion_choice(body: Completion, call: SampledRequest, pending: PendingCompletion) -> dict[str, Any]:
    """Write a finished completion."""
    tokens = [] if call.only_prompt else pending.tokens
    logprobs = None
    if body.logprobs is not None:
        logprobs = completion_logprobs(body, call, pending, 0, len(tokens))
    text = "" if call.only_prompt else pending.text
    if body.echo:
        before = echoed(body, call, pending)
        text = before + text
        if logprobs is not None:
            logprobs = with_prompt(body, call, pending, logprobs, before)
    ids = {"token_ids": tokens, "prompt_token_ids": pending.prompt.tolist()}
    return {
        "index": pending.index,
        "text": text,
        "logprobs": logprobs,
        **ending(call, pending),
        **(ids if body.return_token_ids else dict.fromkeys(ids)),
        "prompt_logprobs": read_prompt(body, call, pending),
        "weight_versions": [] if call.only_prompt else versions(pending),
    }


def ending(call: SampledRequest, pending: PendingCompletion) -> dict[str, Any]:
    """Write what ended a completion; None while nothing did."""
    if call.only_prompt and pending.over:
        return {"finish_reason": "length", "stop_reason": None}
    return {"finish_reason": pending.finish_reason, "stop_reason": pending.stop_reason}


def echoed(body: Completion, call: SampledRequest, pending: PendingCompletion) -> str:
    """Return the text of the prompt: as it was given, or what its ids say after those that the tokenizer adds."""
    if isinstance(body.prompt, str):
        return body.prompt
    given: Any = body.prompt[call.prompt_of(pending)]
    if isinstance(given, str):
        return given
    text: str = call.target.served.tokenizer.decode(
        pending.prompt[added(call, pending) :].tolist(),
        skip_special_tokens=False,
        clean_up_tokenization_spaces=False,
    )
    return text


def added(call: SampledRequest, pending: PendingCompletion) -> int:
    """Count the tokens at the start of a prompt that the tokenizer adds to a text: a BOS, or none."""
    return int(pending.prompt[0] == call.target.served.added_bos)


def with_prompt(
    body: Completion, call: SampledRequest, pending: PendingCompletion, logprobs: dict[str, Any], before: str
) -> dict[str, Any]:
    """Put the prompt's tokens in front of a completion's log-probabilities. before: the text of the prompt."""
    as_id = bool(body.return_tokens_as_token_ids)
    names = [token_text(call, token, as_id) for token in pending.prompt.tolist()]
    own: list[Any] = [None] * len(names)
    top: list[Any] = [None] * len(names)
    for at, (logp, _, ids, logps) in enumerate(pending.prompt_logps, 1):
        most = body.logprobs or 0
        row = {token_text(call, i, as_id): finite(p) for i, p in zip(ids[:most], logps[:most], strict=True)}
        own[at] = finite(logp)
        top[at] = {names[at]: own[at], **row}
    return {
        "text_offset": [*prompt_offsets(call, pending, before), *shifted(logprobs, before)["text_offset"]],
        "token_logprobs": [*own, *logprobs["token_logprobs"]],
        "tokens": [*names, *logprobs["tokens"]],
        "top_logprobs": [*top, *logprobs["top_logprobs"]],
    }


def prompt_offsets(call: SampledRequest, pending: PendingCompletion, before: str) -> list[int]:
    """Return where in the prompt's text each of its tokens begins."""
    names = [token_text(call, token, False) for token in pending.prompt.tolist()]
    lengths = [len(name) for name in names]
    count = added(call, pending)
    lengths[:count] = [0] * count
    # SentencePiece writes a blank in front of a text's first token.
    if count < len(names) and names[count].startswith(" ") and not before.startswith(" "):
        lengths[count] -= 1
    starts: list[int] = np.minimum(np.cumsum([0, *lengths[:-1]]), len(before)).tolist()
    return starts


def shifted(logprobs: dict[str, Any], before: str) -> dict[str, Any]:
    """Count the offsets of a completion's tokens from the start of the text that the prompt is in front of."""
    return {**logprobs, "text_offset": [len(before) + at for at in logprobs["text_offset"]]}


def prompt_logprobs(call: SampledRequest, pending: PendingCompletion, most: int) -> list[Any] | None:
    """Write the log-probabilities of a prompt's tokens and of the `most` likeliest ones, as vLLM has them: at
    temperature 1, None for the first.
    """
    if len(pending.prompt_logps) < len(pending.prompt) - 1:
        return None  # it was ended before
    out: list[Any] = [None]
    for token, (logp, rank, ids, logps) in zip(
        pending.prompt[1:].tolist(), pending.prompt_logps, strict=True
    ):
        rows = {int(token): (logp, rank)}
        for place, (i, p) in enumerate(zip(ids[:most], logps[:most], strict=True), 1):
            rows.setdefault(int(i), (p, place))
        out.append(
            {
                str(i): {"logprob": finite(p), "rank": int(r), "decoded_token": token_text(call, i, False)}
                for i, (p, r) in rows.items()
            }
        )
    return out


def read_prompt(body: Sampling, call: SampledRequest, pending: PendingCompletion) -> list[Any] | None:
    """Write `prompt_logprobs`, where a request asks for them."""
    return None if body.prompt_logprobs is None else prompt_logprobs(call, pending, body.prompt_logprobs)


async def finished(call: SampledRequest) -> None:
    """Wait for all completions. Raises what ended one."""
    for pending in call.completions:
        while not pending.over:
            pending.changed.clear()
            await pending.changed.wait()
    for pending in call.completions:
        if pending.error is not None:
            raise pending.error


async def changes(call: SampledRequest) -> AsyncIterator[tuple[PendingCompletion, int, int]]:
    """Yield (completion, tokens yielded before, characters yielded before) each time that one has more, until all end.

    A completion's last time is when it is over, even if nothing was added.
    """
    seen = {pending.number: (0, 0) for pending in call.completions}
    left = list(call.completions)
    while left:
        for pending in list(left):
            tokens, characters = seen[pending.number]
            if pending.error is not None:
                raise pending.error
            over = pending.over
            if over or len(pending.tokens) > tokens or pending.settled > characters:
                seen[pending.number] = (len(pending.tokens), pending.settled)
                yield pending, tokens, characters
            if over:
                left.remove(pending)
        if left and not any(pending.changed.is_set() for pending in left):
            await _next_change(left)
        for pending in left:
            pending.changed.clear()


async def _next_change(completions: Sequence[PendingCompletion]) -> None:
    """Wait until one of the completions has changed."""
    import asyncio

    tasks = [asyncio.ensure_future(pending.changed.wait()) for pending in completions]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def completion_answer(body: Completion, call: SampledRequest) -> dict[str, Any]:
    """Write the answer to a request for completions."""
    return {
        "id": call.id,
        "object": "text_completion",
        "created": call.created,
        "model": call.target.name,
        "choices": [completion_choice(body, call, pending) for pending in call.completions],
        "usage": call.usage(),
    }


async def completion_stream(body: Completion, call: SampledRequest) -> AsyncIterator[dict[str, Any]]:
    """Yield the parts of the answer to a request for completions."""
    head = {"id": call.id, "object": "text_completion", "created": call.created, "model": call.target.name}
    options = body.stream_options
    begun: set[int] = set()
    async for pending, start, characters in changes(call):
        first = pending.number not in begun
        begun.add(pending.number)
        text = "" if call.only_prompt else pending.text[characters : pending.settled]
        tokens: list[int] = [] if call.only_prompt else pending.tokens[start:]
        choice: dict[str, Any] = {
            "index": pending.index,
            "text": text,
            "logprobs": None,
            **ending(call, pending),
        }
        if body.logprobs is not None:
            choice["logprobs"] = completion_logprobs(body, call, pending, start, start + len(tokens))
        if body.echo:
            before = echoed(body, call, pending)
            logprobs = choice["logprobs"]
            if first:
                choice["text"] = before + text
            if logprobs is not None and first:
                choice["logprobs"] = with_prompt(body, call, pending, logprobs, before)
            elif logprobs is not None:
                choice["logprobs"] = shifted(logprobs, before)
        if first and body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = read_prompt(body, call, pending)
        if body.return_token_ids:
            choice["token_ids"] = tokens
            choice["prompt_token_ids"] = pending.prompt.tolist() if first else None
        if pending.over:
            choice["weight_versions"] = [] if call.only_prompt else versions(pending)
        part = {**head, "choices": [choice]}
        if options and options.continuous_usage_stats:
            part["usage"] = call.usage()
        yield part
    if options and options.include_usage:
        yield {**head, "choices": [], "usage": call.usage()}


def prepare_generate(body: Generate, target: NamedModel) -> Prepared:
    """Check a request of ids for ids. Raises BadRequest."""
    sampling = body.sampling_params
    refuse_ignored(sampling)
    prompts = [check_ids(body.token_ids, target, "token_ids")]
    if sampling.max_tokens == 0:
        raise BadRequest("sampling_params.max_tokens: must be at least 1", param="sampling_params")
    limit = room(target, prompts, sampling.max_tokens, "sampling_params.max_tokens")
    generation = make_generation_params(sampling, target, limit, sampling.logprobs)
    reads = sampling.prompt_logprobs is not None
    return Prepared(
        body.request_id or uuid.uuid4().hex,
        target,
        prompts,
        sampling.n or 1,
        generation,
        reads_prompt=reads,
        streams=bool(body.stream),
    )


def generate_choice(
    body: Generate, call: SampledRequest, pending: PendingCompletion, start: int = 0
) -> dict[str, Any]:
    """Write a completion's tokens from `start` on, as vLLM's `/inference/v1/generate` does."""
    logprobs = None
    if body.sampling_params.logprobs is not None:
        logprobs = {"content": [_generated(pending, i) for i in range(start, len(pending.tokens))]}
    choice: dict[str, Any] = {
        "index": pending.index,
        "finish_reason": pending.finish_reason,
        "stop_reason": pending.stop_reason,
        "token_ids": pending.tokens[start:],
        "logprobs": logprobs,
    }
    if pending.over:
        choice["weight_versions"] = versions(pending)
    return choice


def _generated(pending: PendingCompletion, i: int) -> dict[str, Any]:
    token = pending.tokens[i]
    logp = finite(pending.logps[i])
    ids, logps = pending.likeliest[i] if pending.likeliest else ([], [])
    ranks = {each: rank for rank, each in enumerate(ids, 1)}
    top = [{"token_id": token, "logprob": logp, "rank": ranks.get(token)}]
    top += [
        {"token_id": each, "logprob": finite(p), "rank": ranks[each]}
        for each, p in zip(ids, logps, strict=True)
        if each != token
    ]
    return {**top[0], "top_logprobs": top}


def generate_answer(body: Generate, call: SampledRequest) -> dict[str, Any]:
    """Write the answer to a request of ids for ids."""
    choices = [generate_choice(body, call, pending) for pending in call.completions]
    if body.output_mode == "text":
        choices = [{**each, "text": f.text} for each, f in zip(choices, call.completions, strict=True)]
    return {
        "output_mode": body.output_mode,
        "request_id": call.id,
        "model": call.target.name,
        "created": call.created,
        "choices": choices,
        "usage": call.usage(),
        "prompt_logprobs": read_prompt(body.sampling_params, call, call.completions[0]),
        "prompt_token_ids": call.prompts[0].tolist() if body.return_token_ids else None,
    }


async def generate_stream(body: Generate, call: SampledRequest) -> AsyncIterator[dict[str, Any]]:
    """Yield the parts of the answer to a request of ids for ids."""
    head = {"output_mode": body.output_mode, "request_id": call.id}
    first: dict[str, Any] = {"prompt_token_ids": call.prompts[0].tolist()} if body.return_token_ids else {}
    async for pending, start, characters in changes(call):
        choice = generate_choice(body, call, pending, start)
        if body.output_mode == "text":
            choice["text"] = pending.text[characters : pending.settled]
        yield {**head, **first, "choices": [choice]}
        first = {}
    if body.stream_options and body.stream_options.include_usage:
        yield {**head, "choices": [], "usage": call.usage()}
