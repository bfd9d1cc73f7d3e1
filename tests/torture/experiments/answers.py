"""Read mutated answers, messages, requests and journals: each is a value or the reader's own error, in no time."""

from __future__ import annotations

import asyncio
import io
import json
import random
import resource
import struct
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.torture.experiment import Case, Trial

SHARE = 0.3
AT_ONCE, CASES = 500, 20
"""Bodies of a case, and cases of a reader."""
SECONDS, MEMORY = 2.0, 1 << 30
"""Limits of reading one body."""
PATIENCE = 0.02
"""Seconds of a client that waits for an answer."""
MESSAGES = [
    {"role": "system", "content": [{"type": "text", "text": "a"}]},
    {"role": "user", "content": "b"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [2, "b"]}'}},
            {"id": "c2", "type": "function", "function": {"name": "g", "arguments": {"a": None}}},
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "7"},
]
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": '{"type": "object", "properties": {}}'}}
]
VERDICTS = (
    "Score: 7",
    "**Score (0-10):** 7/10 (good)",
    "<think>Score: 3</think><score>7</score>",
    '```json\n{"score": 7}\n```',
)
EXAMPLES: Mapping[str, tuple[Any, ...]] = {
    "scores": ({"scores": [0.5, None, 1]},),
    "rows": ({"data": [{"index": i, "score": 0.5} for i in range(3)]},),
    "judge": tuple(
        {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]} for text in VERDICTS
    ),
    "chat": ({"messages": MESSAGES, "tools": TOOLS, "model": "m", "temperature": 0.5},),
    "messages": ({"messages": MESSAGES, "tools": TOOLS},),
    "vllm": (
        {
            "choices": [
                {
                    "index": i,
                    "finish_reason": "length",
                    "token_ids": [7, 8, 9],
                    "prompt_token_ids": [5, 6],
                    "logprobs": {"token_logprobs": [-0.5, -1.5, -2.5]},
                }
                for i in range(2)
            ]
        },
    ),
    "sglang": (
        [
            {
                "meta_info": {
                    "prompt_tokens": 2,
                    "finish_reason": {"type": "length"},
                    "output_token_logprobs": [[-0.5, 7, None], [-1.5, 8, None], [-2.5, 9, None]],
                    "weight_version": "1",
                }
            }
            for _ in range(2)
        ],
    ),
    "probe": ({"choices": [{"prompt_logprobs": [None, {"6": {"logprob": -0.5}}]}]},),
    "models": ({"data": [{"id": "m", "root": None, "parent": None, "max_model_len": 64}]},),
    "requests": (
        b"GET /v1/models HTTP/1.1\r\nHost: h:80\r\nAuthorization: Bearer a\r\n\r\n",
        *(
            b"POST %b HTTP/1.1\r\nHost: h:80\r\nContent-Length: %d\r\nOrigin: http://h:80\r\n\r\n%b"
            % (path, len(body), body)
            for path, body in (
                (b"/v1/completions", b'{"model": "m", "prompt": [1, 2], "max_tokens": 2, "stop": ["a"]}'),
                (b"/v1/chat/completions", b'{"model": "m", "messages": [{"role": "user", "content": "a"}]}'),
                (b"/tokenize", b'{"model": "m", "prompt": "a"}'),
            )
        ),
    ),
    "journal": (b"",),
}
"""By reader: values that become JSON, and bytes, which are changed as they are. A journal is written by its reader."""
SERVICES = ("scores", "rows", "judge")
"""Readers whose ValueError says what is expected, and is tried again by the caller."""
ENGINES = ("vllm", "sglang", "probe", "models")
PIECES = (
    *(
        b"null",
        b"true",
        b"[]",
        b"{}",
        b'""',
        b"-1",
        b"1e999",
        b"NaN",
        b"9" * 400,
        b"9" * 5000,
        b'"\\ud800"',
        b"\xff",
    ),
    *(
        b"[" * 50_000,
        b'{"a":' * 50_000,
        b" " * 100_000,
        b"score " * 20_000,
        b"Score: ",
        b"<think>",
        b"```\n",
        b"\x00",
    ),
)


def run(trial: Trial) -> None:
    names = [f"{name} {number}" for number in range(CASES) for name in EXAMPLES]
    trial.each(names, partial(_judge, trial.seed), seconds=120)


def _judge(seed: int, case: Case) -> None:
    name, number = case.name.split()
    read, allowed = _reader(name)
    base = 1024 * int(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0])
    resource.setrlimit(resource.RLIMIT_DATA, (base + MEMORY, resource.RLIM_INFINITY))
    draw = random.Random(f"{name} {seed} {number}")
    for example in EXAMPLES[name]:
        # Else every one that is changed would be refused, too.
        if not isinstance(example, bytes):
            read(json.dumps(example).encode())
    for _ in range(AT_ONCE):
        example = draw.choice(EXAMPLES[name])
        if name == "judge" and draw.random() < 0.5:
            text = _mutated(draw.choice(VERDICTS).encode(), draw).decode(errors="replace")
            example = {"choices": [{"message": {"content": text}}]}
            body = json.dumps(example).encode()
        elif name == "journal":
            body = _damaged_zip(case.directory, draw)
        else:
            content = example if isinstance(example, bytes) else json.dumps(example).encode()
            body = _mutated(content, draw)
        begun, outcome = time.monotonic(), "read"
        try:
            read(body)
        except allowed:
            outcome = "refused"
        except BaseException as error:
            case.fail(f"{body[:500]!r}: {''.join(traceback.format_exception(error)[-3:])}")
            return
        case.count("bodies")
        case.count(outcome)
        taken = time.monotonic() - begun
        case.require(taken < SECONDS, f"{body[:500]!r} was read in {taken:.1f} s")


def _mutated(body: bytes, draw: random.Random) -> bytes:
    """Cut a body, repeat a part of it, change a byte, or put a piece in place of a part, once or several times."""
    for _ in range(draw.choice((1, 1, 2, 3))):
        first, last = sorted(draw.randrange(len(body) + 1) for _ in range(2))
        change = draw.randrange(5)
        if change == 0:
            body = body[:first]
        elif change == 1:
            body = body[:last] + body[first:]
        elif change == 2:
            body = body[:first] + bytes([draw.randrange(256)]) + body[first + 1 :]
        else:
            values = [i for i, byte in enumerate(body) if byte in b":[,"]
            start = draw.choice(values) + 1 if values else first
            end = next((i for i in range(start, len(body)) if body[i] in b",]}"), len(body))
            body = body[:start] + draw.choice(PIECES) + body[end if change == 3 else start :]
    return body


def _rollout() -> Any:
    """Make the rollout of a journal: two prompts with two completions each."""
    import numpy as np

    from rlhf_core import Rollouts
    from rlhf_core.rollouts import Rollout
    from rlhf_core.rollouts.journal import JournalEntry

    tokens = np.arange(12, dtype=np.int32).reshape(4, 3)
    samples = Rollouts(tokens, np.full(4, 3, np.int32), np.full((4, 3), -0.5, np.float32), np.ones(4, bool))
    rewards = np.arange(4.0)
    rows = [
        {"prompt": "a", "completion": "b", "reward": reward, "length": 3, "finished": True}
        for reward in rewards
    ]
    rollout = Rollout(
        np.array([4, 2]), samples, rewards[:, None], rewards, samples_read=rows, metrics={"x": 0.5}
    )
    return JournalEntry(rollout, [0], {"length": None})


def _facts(entry: Any) -> str:
    """Write all that was read of a rollout as text."""
    rollout = entry.rollout
    arrays = {name: (str(array.dtype), array.tolist()) for name, array in rollout.arrays().items()}
    return repr((arrays, dict(rollout.metrics), rollout.rounds, [*rollout.samples_read], *entry[1:]))


def _write_journal(directory: Path) -> None:
    from rlhf_core.rollouts.journal import Journal

    Journal(directory, [0], writes=True).write(_rollout(), [])


def _damaged_zip(directory: Path, draw: random.Random) -> bytes:
    """Write a rollout; flip bits of its file, cut it, or give a member a size in the directory that it has not."""
    path = directory / "rollout-000000.zip"
    if not path.exists():
        _write_journal(directory)
    content = bytearray(path.read_bytes())
    how = draw.randrange(4)
    if how == 0:
        del content[draw.randrange(len(content)) :]
    elif how == 1:
        members = zipfile.ZipFile(io.BytesIO(content)).infolist()
        entry = content.index(b"PK\1\2", members[-1].header_offset)
        for _ in range(draw.randrange(len(members))):
            entry = content.index(b"PK\1\2", entry + 4)
        # The compressed size and the size, of which either may lie.
        place = entry + draw.choice((20, 24))
        content[place : place + 4] = struct.pack(
            "<I", draw.choice((0, 1, 2**31, 2**32 - 1, draw.randrange(9999)))
        )
    else:
        for _ in range(draw.choice((1, 1, 2, 8))):
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return bytes(content)


class _Transport(asyncio.Transport):
    """The client's side of a connection, in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.closing = bytearray(), False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 9), "sockname": ("127.0.0.1", 80)}.get(name, default)

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.closing = True

    abort = close

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        """Do nothing: all bytes are there."""

    resume_reading = write_eof = pause_reading

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Keep the protocol."""


def _serving() -> Callable[[bytes], object]:
    """Return a function that has `rlhf serve`, without a model, answer the bytes of a connection."""
    import uvicorn
    from rlhf_http.connections import Connection
    from rlhf_serve.app import make_app
    from rlhf_serve.running import ServeSettings, make_server
    from uvicorn.server import ServerState

    config = uvicorn.Config(
        make_app(make_server({}, ServeSettings(()))),
        http=Connection,
        log_config=None,
        log_level="critical",
        lifespan="off",
    )
    config.load()

    async def exchange(body: bytes) -> bytes:
        loop, errors = asyncio.get_running_loop(), []
        loop.set_exception_handler(lambda _, context: errors.append(context))
        state, transport = ServerState(), _Transport()
        connection = Connection(config=config, server_state=state, app_state={}, _loop=loop)
        connection.connection_made(transport)
        connection.data_received(body)
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=PATIENCE)
        # A body that was cut is waited for until the client leaves.
        connection.connection_lost(None)
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=SECONDS)
        if errors or state.tasks:
            raise RuntimeError(f"{errors or 'it still answers'}")
        return bytes(transport.written)

    def answer(body: bytes) -> None:
        written = asyncio.run(exchange(body))
        if written and not written.startswith((b"HTTP/1.1 2", b"HTTP/1.1 4")):
            raise RuntimeError(f"it answered {written[:200]!r}")
        if not written.startswith(b"HTTP/1.1 2"):
            raise ConnectionError

    return answer


def _reader(name: str) -> tuple[Callable[[bytes], object], tuple[type[BaseException], ...]]:
    """Return a reader and what it raises for bodies that it refuses."""
    import httpx
    from rlhf_http import fields
    from rlhf_remote import engines, rewards, rubric, service, transport

    from rlhf_core.data.columns import message_problem, tools_of
    from rlhf_core.errors import InputError, RunError
    from rlhf_core.rollouts.journal import Journal
    from rlhf_core.tokenizer.chat_template import ChatTemplate

    def parsed(body: bytes) -> Any:
        return transport.Answer("http://h/", 200, httpx.Headers(), body).json()

    def judged(body: bytes) -> object:
        text, _ = rewards._message(parsed(body))
        return rubric.Scale(0, 10).read(text)

    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}{{ (tools or []) | tojson }}"
    )
    chat = ChatTemplate(SimpleNamespace(chat_template=template, special_tokens_map={}))

    def rendered(body: bytes) -> object:
        row = parsed(body)
        messages = row.get("messages") if isinstance(row, dict) else None
        problem = message_problem(messages)
        if problem is not None:
            raise InputError(problem)
        return chat.write(messages, tools=tools_of(row)).encode(errors="surrogatepass")

    def asked(kind: str, ask: Callable[[Any], Any]) -> Callable[[bytes], object]:
        engine = engines.KINDS[kind]("http://h", None, SECONDS)

        def read(body: bytes) -> object:
            engine._exchange = lambda *_: transport.Answer("http://h/", 200, httpx.Headers(), body)
            return ask(engine)

        return read

    def sampled(engine: Any) -> None:
        wanted = engines.Wanted(0.7, 3, (1,))
        for drawn in engine.complete("m", [5, 6], 2, 0, wanted):
            engines.require_logps(drawn, engine.url, 128)
            engines.require_end(drawn, engine.url, wanted, lambda ids: False)

    def facts(body: bytes | None) -> str:
        with tempfile.TemporaryDirectory() as directory:
            if body is None:
                _write_journal(Path(directory))
            else:
                Path(directory, "rollout-000000.zip").write_bytes(body)
            return _facts(Journal(Path(directory), [0], writes=False).read(0))

    whole = facts(None)

    def journal(body: bytes) -> None:
        if facts(body) != whole:
            raise RuntimeError("another rollout was read")

    readers: Mapping[str, Callable[[bytes], object]] = {
        "scores": lambda body: rewards._scores(3, parsed(body)),
        "rows": lambda body: service.row_scores(3, parsed(body)),
        "judge": judged,
        "chat": lambda body: fields.read(fields.ChatRequest, body),
        "messages": rendered,
        "vllm": asked("vllm", sampled),
        "sglang": asked("sglang", sampled),
        "probe": asked("vllm", lambda engine: engine.logps("m", [5, 6])),
        "models": asked("vllm", lambda engine: engine.models()),
        "requests": _serving() if name == "requests" else rendered,
        "journal": journal,
    }
    errors: tuple[type[BaseException], ...] = (InputError, transport.AnswerError)
    if name in ENGINES:
        errors = (RunError, engines.EngineDownError)
    elif name == "requests":
        errors = (ConnectionError,)
    elif name in SERVICES:
        errors = (*errors, ValueError)
    return readers[name], errors
