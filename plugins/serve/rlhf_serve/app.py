"""The routes of a server: what is answered, and what is refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlhf_http.fields import (
    BadRequest,
    ChatRequest,
    Classify,
    Completion,
    Detokenize,
    Generate,
    Score,
    Tokenize,
    read,
    require_short,
)
from rlhf_http.gate import Gate
from rlhf_http.handling import Busy, answered, body_of, error_answer, failure, http_error, json_bytes
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import rlhf_core
from rlhf_core.errors import suggest
from rlhf_serve import answers, chats, scores
from rlhf_serve.answers import NamedModel, Prepared, SampledRequest
from rlhf_serve.engine import Engine
from rlhf_serve.metrics import Metrics
from rlhf_serve.opening import ServedPolicy, ServedScorer

LARGE = 2**16
"""Bytes of a body that is read in another thread."""


@dataclass(eq=False)
class Server:
    """What the routes of one server share."""

    models: Mapping[str, ServedPolicy | ServedScorer]
    engine: Engine
    key: str | None = None
    """What clients have to send as a bearer token; None: nothing."""
    most_waiting: int = 1024
    """Completions of a policy that run or wait; requests for more are refused."""
    draining: bool = False
    metrics: Metrics = field(default_factory=Metrics)
    calls: set[SampledRequest] = field(default_factory=set)
    requests: int = 0
    """Requests that are being answered."""
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "large bodies"))

    def policies(self) -> list[ServedPolicy]:
        return [each for each in self.models.values() if isinstance(each, ServedPolicy)]

    def names(self) -> list[str]:
        """List the names that requests may use."""
        adapters = [name for policy in self.policies() for name in policy.adapters]
        return [*self.models, *adapters]

    def find(self, name: str | None) -> ServedPolicy | ServedScorer | NamedModel:
        """Find what a request's model name means. Raises BadRequest with status 404 where there is no such model."""
        if not name:
            if len(self.models) == 1:
                return next(iter(self.models.values()))
            raise BadRequest(f"model: name one of {', '.join(self.names())}", param="model")
        if name in self.models:
            return self.models[name]
        for policy in self.policies():
            adapter = policy.adapters.get(name)
            if adapter:
                return NamedModel(name, policy, adapter.weights)
        raise BadRequest(
            f"model: there is no '{name}'.{suggest(name, self.names())} Models: {', '.join(self.names())}",
            param="model",
            status=404,
            kind="NotFoundError",
        )

    def policy(self, name: str | None) -> NamedModel:
        """Find the policy, or the adapter of one, that a request names. Raises BadRequest."""
        own = self.policies()
        found = own[0] if not name and len(own) == 1 else self.find(name)
        if isinstance(found, ServedScorer):
            raise BadRequest(
                f"model: {found.name} is a reward model, which does not write; it answers /score and /classify",
                param="model",
            )
        if isinstance(found, NamedModel):
            return found
        return NamedModel(found.name, found, found.policy.weights)

    def scorer(self, name: str | None) -> ServedScorer:
        """Find the reward model that a request names, or the only one. Raises BadRequest."""
        if self.draining:
            raise Busy("the server is stopping", 503)
        own = [each for each in self.models.values() if isinstance(each, ServedScorer)]
        found = own[0] if not name and len(own) == 1 else self.find(name)
        if not isinstance(found, ServedScorer):
            raise BadRequest(f"model: {found.name} is a language model, which does not score", param="model")
        return found

    def begin(self, target: NamedModel, prepared: Prepared) -> SampledRequest:
        """Begin the completions of a request. Raises BadRequest as `require_room` does."""
        self.require_room(target, prepared.count)
        call = prepared.take_off(self.engine)
        self.calls.add(call)
        return call

    def require_room(self, target: NamedModel, count: int) -> None:
        """Raise BadRequest with status 429 where `count` more completions would be too many, and 503 while draining."""
        if self.draining:
            raise Busy("the server is stopping", 503)
        if count > self.most_waiting:
            raise answers.too_many(count, self.most_waiting)
        waiting = sum(
            not pending.over
            for call in self.calls
            for pending in call.completions
            if call.target.served is target.served
        )
        if waiting and waiting + count > self.most_waiting:
            raise Busy(
                f"{waiting:,} completions run or wait, and {count:,} more would be more than {self.most_waiting:,}; "
                "try again later",
                429,
            )


async def off_loop(server: Server, content: bytes, function: Callable[[], Any]) -> Any:
    """Call a function whose time grows with a body's: in another thread, if the body is large."""
    if len(content) < LARGE:
        return function()
    return await asyncio.get_running_loop().run_in_executor(server.threads, function)


class Flow(Response):
    """An answer that comes while it is made: a stream of events, or one JSON object; a client that goes ends it."""

    def __init__(
        self, server: Server, call: SampledRequest, parts: AsyncIterator[Any] | None, whole: Any = None
    ) -> None:
        """parts: of a stream; None: `whole` is called for the answer once all completions are over."""
        self.server, self.call, self.parts, self.whole = server, call, parts, whole
        self.background = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        answer = asyncio.ensure_future(self._answer(scope, receive, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
        finally:
            for task in (answer, gone):
                task.cancel()
            for pending in self.call.completions:
                if not pending.over:
                    pending.finish("abort")
                    pending.end(pending)
            self.server.calls.discard(self.call)
            self.server.metrics.count(self.call, time.monotonic())

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        if self.parts is None:
            try:
                await answers.finished(self.call)
                response: Response = Response(json_bytes(self.whole()), media_type="application/json")
            except Exception as error:
                response = failure(error)
            await response(scope, receive, send)
            return
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def event(content: bytes, more: bool = True) -> None:
            await send(
                {"type": "http.response.body", "body": b"data: " + content + b"\n\n", "more_body": more}
            )

        try:
            async for part in self.parts:
                await event(json_bytes(part))
                await asyncio.sleep(0)  # other requests go on, and a client that is gone is noticed
        except OSError:
            raise
        except Exception as error:
            await event(bytes(failure(error).body))
        await event(b"[DONE]", more=False)


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def health(request: Request) -> Response:
    """Say whether requests are answered."""
    server: Server = request.app.state.server
    if server.draining or not server.engine.alive:
        return error_answer("the server is stopping", 503, "server_error")
    return JSONResponse({})


async def models(request: Request) -> Response:
    """List the models, and the adapters under the policies that they belong to."""
    server: Server = request.app.state.server
    cards = []
    for served in server.models.values():
        card = {
            "id": served.name,
            "object": "model",
            "created": request.app.state.created,
            "owned_by": "rlhf",
            "root": served.path,
            "parent": None,
            "max_model_len": served.length if isinstance(served, ServedPolicy) else None,
            "kind": "language_model" if isinstance(served, ServedPolicy) else "reward_model",
        }
        adapters = served.adapters.values() if isinstance(served, ServedPolicy) else ()
        cards += [card, *({**card, "id": a.name, "root": a.path, "parent": served.name} for a in adapters)]
    return JSONResponse({"object": "list", "data": cards})


async def metrics(request: Request) -> Response:
    """Write the metrics."""
    server: Server = request.app.state.server
    content = server.metrics.text(*server.engine.load())
    return Response(content, media_type="text/plain; version=0.0.4; charset=utf-8")


async def load(request: Request) -> Response:
    """Say how many completions run or wait, as vLLM's `/load`."""
    server: Server = request.app.state.server
    return JSONResponse({"server_load": sum(server.engine.load())})


async def version(request: Request) -> Response:
    """Say which version answers."""
    return JSONResponse({"version": rlhf_core.__version__})


async def completions(request: Request) -> Response:
    """Complete prompts."""
    server: Server = request.app.state.server
    content = await body_of(request)

    def begin() -> tuple[Completion, NamedModel, Any]:
        body = read(Completion, content)
        target = server.policy(body.model)
        return body, target, answers.prepare_completions(body, target, server.most_waiting)

    body, target, prepared = await off_loop(server, content, begin)
    call = server.begin(target, prepared)
    if body.stream:
        return Flow(server, call, answers.completion_stream(body, call))
    return Flow(server, call, None, partial(answers.completion_answer, body, call))


async def chat_completions(request: Request) -> Response:
    """Continue chats."""
    server: Server = request.app.state.server
    content = await body_of(request)

    def begin() -> tuple[ChatRequest, NamedModel, Any, chats.Calling]:
        body = read(ChatRequest, content)
        target = server.policy(body.model)
        tools = chats.calling(body, target)
        return body, target, chats.prepare_chat(body, target), tools

    body, target, prepared, tools = await off_loop(server, content, begin)
    call = server.begin(target, prepared)
    if body.stream:
        return Flow(server, call, chats.chat_stream(body, call, tools))
    return Flow(server, call, None, partial(chats.chat_answer, body, call, tools))


async def generate(request: Request) -> Response:
    """Complete ids with ids, as vLLM's `/inference/v1/generate`."""
    server: Server = request.app.state.server
    content = await body_of(request)

    def begin() -> tuple[Generate, NamedModel, Any]:
        body = read(Generate, content)
        target = server.policy(body.model)
        return body, target, answers.prepare_generate(body, target)

    body, target, prepared = await off_loop(server, content, begin)
    call = server.begin(target, prepared)
    if body.stream:
        return Flow(server, call, answers.generate_stream(body, call))
    return Flow(server, call, None, partial(answers.generate_answer, body, call))


def tokenizing(server: Server, name: str | None) -> Any:
    """Find the encoder, the tokenizer and the context's length of a model, of either kind."""
    found = server.find(name)
    if isinstance(found, ServedScorer):
        return found.scorer.encoder, found.scorer.contract.max_length
    served = found.served if isinstance(found, NamedModel) else found
    return served.encoder, served.length


async def score(request: Request) -> Response:
    """Score rows by a reward model."""
    server: Server = request.app.state.server
    content = await body_of(request)
    body = await off_loop(server, content, partial(read, Score, content))
    served = server.scorer(body.model)
    answer = await scores.score(body, served, server.engine)
    server.metrics.scored.labels(served.name).inc(len(answer["data"]))
    return Response(json_bytes(answer), media_type="application/json")


async def classify(request: Request) -> Response:
    """Score texts or conversations by a reward model, as vLLM's `/classify`."""
    server: Server = request.app.state.server
    content = await body_of(request)
    body = await off_loop(server, content, partial(read, Classify, content))
    served = server.scorer(body.model)
    answer = await scores.classify(body, served, server.engine)
    server.metrics.scored.labels(served.name).inc(len(answer["data"]))
    return Response(json_bytes(answer), media_type="application/json")


async def tokenize(request: Request) -> Response:
    """Encode a text or a chat."""
    server: Server = request.app.state.server
    content = await body_of(request)

    def work() -> dict[str, Any]:
        body = read(Tokenize, content)
        encoder, length = tokenizing(server, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise BadRequest("give either prompt or messages", param="prompt")
        if body.prompt is None:
            ids = chats.encode_chat(body, server.policy(body.model))
        else:
            require_short([body.prompt], length, "prompt")
            ids = encoder.tokenize_open([(body.prompt, body.add_special_tokens is not False)])[0]
        names = encoder.tokenizer.convert_ids_to_tokens(ids.tolist()) if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": length, "tokens": ids.tolist(), "token_strs": names}

    return Response(json_bytes(await off_loop(server, content, work)), media_type="application/json")


async def detokenize(request: Request) -> Response:
    """Decode ids, special tokens included."""
    server: Server = request.app.state.server
    content = await body_of(request)

    def work() -> dict[str, Any]:
        body = read(Detokenize, content)
        encoder, _ = tokenizing(server, body.model)
        size = len(encoder.tokenizer)
        unknown = [i for i in body.tokens if i >= size]
        if unknown:
            raise BadRequest(f"tokens: the tokenizer has no token {unknown[0]}", param="tokens")
        return {"prompt": encoder.tokenizer.decode(body.tokens, clean_up_tokenization_spaces=False)}

    return Response(json_bytes(await off_loop(server, content, work)), media_type="application/json")


class Counting:
    """Middleware: counts requests, by path and status. Plain ASGI, for streams."""

    def __init__(self, app: Any, server: Server) -> None:
        self.app = app
        self.server = server

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        self.server.requests += 1
        known = {getattr(route, "path", "") for route in self.app.routes}
        path = scope["path"] if scope["path"] in known else "other"
        status = 499

        async def counted(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self.app(scope, receive, counted)
        except asyncio.CancelledError:
            # While draining, its connection was cut off.
            if not self.server.draining:
                raise
        finally:
            self.server.requests -= 1
            self.server.metrics.requests.labels(path, status).inc()


def routes() -> list[Route]:
    """List what is always answered."""
    return [
        Route("/health", health, methods=["GET"]),
        Route("/metrics", answered(metrics), methods=["GET"]),
        Route("/load", answered(load), methods=["GET"]),
        Route("/version", answered(version), methods=["GET"]),
        Route("/v1/models", answered(models), methods=["GET"]),
        Route("/v1/completions", answered(completions), methods=["POST"]),
        Route("/v1/chat/completions", answered(chat_completions), methods=["POST"]),
        Route("/inference/v1/generate", answered(generate), methods=["POST"]),
        Route("/score", answered(score), methods=["POST"]),
        Route("/v1/score", answered(score), methods=["POST"]),
        Route("/classify", answered(classify), methods=["POST"]),
        Route("/tokenize", answered(tokenize), methods=["POST"]),
        Route("/detokenize", answered(detokenize), methods=["POST"]),
    ]


def make_app(server: Server, more: Sequence[Route] = ()) -> Any:
    """Make the ASGI application of a server. more: the routes that control it."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        server.engine.start(asyncio.get_running_loop())
        yield
        server.engine.close()

    app = Starlette(
        routes=[*routes(), *more], lifespan=lifespan, exception_handlers={HTTPException: http_error}
    )
    app.state.server = server
    app.state.created = int(time.time())
    return Gate(Counting(app, server), server.key, [route.path for route in more])
