"""Read mutated answers of services and judges, and messages: each is a value or the reader's own error, in no time."""

from __future__ import annotations

import json
import random
import resource
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torture.experiment import Case, Trial

SHARE = 0.3
AT_ONCE, CASES = 500, 20
"""Bodies of a case, and cases of a reader."""
SECONDS, MEMORY = 2.0, 1 << 30
"""Limits of reading one body."""
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
}
SERVICES = ("scores", "rows", "judge")
"""Readers whose ValueError says what is expected, and is tried again by the caller."""
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
    for _ in range(AT_ONCE):
        example = draw.choice(EXAMPLES[name])
        if name == "judge" and draw.random() < 0.5:
            text = _mutated(draw.choice(VERDICTS).encode(), draw).decode(errors="replace")
            example = {"choices": [{"message": {"content": text}}]}
            body = json.dumps(example).encode()
        else:
            body = _mutated(json.dumps(example).encode(), draw)
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


def _reader(name: str) -> tuple[Callable[[bytes], object], tuple[type[BaseException], ...]]:
    """Return a reader and what it raises for bodies that it refuses."""
    import httpx
    from rlhf_remote import rewards, rubric, service, transport
    from rlhf_serve import fields

    from rlhf_core.data.columns import message_problem, tools_of
    from rlhf_core.errors import InputError
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

    readers: Mapping[str, Callable[[bytes], object]] = {
        "scores": lambda body: rewards._scores(3, parsed(body)),
        "rows": lambda body: service.row_scores(3, parsed(body)),
        "judge": judged,
        "chat": lambda body: fields.read(fields.Chat, body),
        "messages": rendered,
    }
    return readers[name], (InputError, transport.AnswerError, *((ValueError,) if name in SERVICES else ()))
