"""Load `rlhf serve` with clients, and check everything that it answers.

    python benchmarks/serve/run.py [--clients 64] [--minutes 5] [--model DIR | --hidden 256] [--url URL] [--out FILE]
    python benchmarks/serve/run.py --vllm VENV/bin/vllm [--clients 16]

Clients ask for completions of mixed lengths, streamed or not, without pause. Each request is one of a few that were
asked alone before, and must get the same tokens. Before that, rounds with fewer clients measure the time to the first
token, and others time fixed work against `Sampler`, as `rlhf generate` uses it, in turn, with the seconds of CPU of the
server and of the sampler: on a busy machine only those can be compared. --vllm starts vLLM with the same model and
sends the same requests to both in turn. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

LENGTH = 512
WORDS = 2000
REQUESTS = 128
"""Distinct requests under load; each is first answered alone, for comparison."""


def make_model(directory: Path, hidden: int = 256) -> Path:
    """Write a llama of six layers with made-up weights, 6 million with 256 hidden units, and a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from rlhf_core.models import fresh_model

    words = ["<pad>", "</s>", "<unk>", *(f"w{i}" for i in range(WORDS))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    sizes = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": 6,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 64,
        "max_position_embeddings": LENGTH,
    }
    fresh_model(sizes, tokenizer=tokenizer).save(directory)
    return directory


def ask(draw: random.Random, name: str) -> dict[str, Any]:
    """Make a request of mixed lengths: 4 to 200 tokens in, 4 to 128 out."""
    prompt = [draw.randrange(3, WORDS) for _ in range(int(4 * 50 ** draw.random()))]
    return {
        "model": name,
        "prompt": [prompt],
        "max_tokens": int(4 * 32 ** draw.random()),
        "temperature": draw.choice([0.0, 0.7, 1.0]),
        "top_p": draw.choice([1.0, 0.9]),
        "seed": draw.randrange(2**32),
        "logprobs": draw.choice([None, 0]),
        "return_token_ids": True,
    }


class Connections:
    """Connections to one server, kept open: a client that leaves the cores to the server."""

    def __init__(self, url: str, key: str | None) -> None:
        parts = urlsplit(url)
        self.tls = parts.scheme == "https"
        self.host, self.port = parts.hostname or "", parts.port or (443 if self.tls else 80)
        lines = [f"Host: {parts.netloc}", "Content-Type: application/json"]
        lines += [] if key is None else [f"Authorization: Bearer {key}"]
        self.head = "POST /v1/completions HTTP/1.1\r\n" + "".join(f"{line}\r\n" for line in lines)
        self.idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        """Yield an answer's body in the pieces in which it comes. Raises ValueError for a refusal."""
        reader, writer = await self._take()
        content = json.dumps(body).encode()
        writer.write(f"{self.head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        status = (await reader.readline()).split()
        length = 0
        while line := (await reader.readline()).strip():
            name, _, value = line.lower().partition(b":")
            length = int(value) if name == b"content-length" else length
        if length:
            answer = await reader.readexactly(length)
            if status[1] != b"200":
                raise ValueError(f"{status[1].decode()}: {answer.decode()[:200]}")
            yield answer
        else:
            while size := int(await reader.readline(), 16):
                yield await reader.readexactly(size)
                await reader.readline()
            await reader.readline()
        self.idle.append((reader, writer))

    async def _take(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self.idle:
            reader, writer = self.idle.pop()
            if not reader.at_eof():
                return reader, writer
            writer.close()  # the server closes those that were idle for long
        return await asyncio.open_connection(self.host, self.port, ssl=self.tls or None)

    def close(self) -> None:
        """Close those that are not in use."""
        for _, writer in self.idle:
            writer.close()


class Load:
    """Asks one server the same requests again and again, and checks its answers."""

    def __init__(self, url: str, name: str, key: str | None = None) -> None:
        self.connections = Connections(url, key)
        self.name = name
        self.requests = [ask(random.Random(number), name) for number in range(REQUESTS)]
        self.alone: list[list[int]] = []
        """The tokens of each request when there was no other."""
        self.first: list[float] = []
        self.problems: Counter[str] = Counter()
        self.answered = self.tokens = 0

    async def learn(self) -> None:
        """Ask each request alone."""
        self.alone = [(await self.send(body))[0] for body in self.requests]

    async def one(self, draw: random.Random) -> None:
        """Send a request, streamed or not, and check its answer."""
        number = draw.randrange(len(self.requests))
        body = {**self.requests[number], "stream": draw.random() < 0.5}
        try:
            tokens, reason, logps = await self.send(body)
        except (OSError, EOFError, KeyError, ValueError, IndexError) as error:
            self.problems[f"lost: {type(error).__name__}"] += 1
            return
        self.answered += 1
        self.tokens += len(tokens)
        if tokens != self.alone[number]:
            self.problems["wrong: not the tokens that it had alone"] += 1
        if reason != "stop" and (reason, len(tokens)) != ("length", body["max_tokens"]):
            self.problems[f"wrong: {reason} after {len(tokens)} tokens"] += 1
        if body["logprobs"] is not None and (len(logps) != len(tokens) or max(logps) > 1e-4):
            self.problems["wrong: log-probabilities"] += 1

    async def send(self, body: dict[str, Any]) -> tuple[list[int], str, list[float]]:
        """Return an answer's tokens, what ended it, and its log-probabilities."""
        start, streams = time.perf_counter(), body.get("stream")
        tokens: list[int] = []
        logps: list[float] = []
        reason, left = "", b""
        async with asyncio.timeout(600):
            async for piece in self.connections.post(body):
                *lines, left = (left + piece).split(b"\n") if streams else (b"data: " + piece, b"")
                for line in lines:
                    if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                        continue
                    choice = json.loads(line[6:])["choices"][0]
                    if streams and not tokens and choice["token_ids"]:
                        self.first.append(time.perf_counter() - start)
                    tokens += choice["token_ids"] or []
                    logps += choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
                    reason = choice["finish_reason"] or reason
        return tokens, reason, logps

    async def run(self, clients: int, seconds: float, seed: int) -> dict[str, Any]:
        """Keep so many clients busy for so long."""
        end, begin = time.perf_counter() + seconds, time.perf_counter()
        answered, tokens, self.first = self.answered, self.tokens, []

        async def client(number: int) -> None:
            draw = random.Random(f"{seed} {number}")
            while time.perf_counter() < end:
                await self.one(draw)

        await asyncio.gather(*map(client, range(clients)))
        took = time.perf_counter() - begin
        return {
            "clients": clients,
            "seconds": round(took, 1),
            "requests": self.answered - answered,
            "tokens_per_second": round((self.tokens - tokens) / took, 1),
            **self.first_tokens(),
        }

    def first_tokens(self) -> dict[str, float]:
        """Sum up the times to the first token, in seconds."""
        first = sorted(self.first) or [float("nan")]
        return {
            "first_token_median": round(statistics.median(first), 3),
            "first_token_95": round(first[int(0.95 * (len(first) - 1))], 3),
        }

    async def work(
        self, prompts: list[list[int]], most: int, clients: int, *, stream: bool = False, whole: bool = False
    ) -> float:
        """Complete each prompt, over so many connections; return tokens per second. whole: stop at no token."""
        left, tokens, start = list(prompts), 0, time.perf_counter()
        self.first = []

        async def client() -> None:
            nonlocal tokens
            while left:
                body = {
                    "model": self.name,
                    "prompt": [left.pop()],
                    "max_tokens": most,
                    "return_token_ids": True,
                    "stream": stream,
                    "ignore_eos": whole,
                }
                written, *_ = await self.send(body)
                tokens += len(written)

        await asyncio.gather(*(client() for _ in range(clients)))
        return tokens / (time.perf_counter() - start)


def generate(model: Path, prompts: list[list[int]], most: int) -> Any:
    """Return the function that completes the prompts as `rlhf generate` does, in tokens per second."""
    import jax
    import numpy as np

    from rlhf_core import SamplerInputs, load_model, runtime
    from rlhf_core.sampling import Sampler, SamplingOptions

    runtime.prepare()
    opened = load_model(model)
    sampler = Sampler(
        SamplerInputs(
            definition=opened.definition,
            options=SamplingOptions(max_completion_length=most),
            mesh=opened.mesh,
            stop_ids=opened.stop_ids,
            prompts_per_call=min(len(prompts), 64),
            max_prompt_length=max(map(len, prompts)),
            tokenizer=opened.tokenizer,
        )
    )
    arrays = [np.array(prompt, np.int32) for prompt in prompts]

    def run() -> float:
        start = time.perf_counter()
        rollouts = sampler(opened.params, arrays, jax.random.key(0))
        return float(rollouts.lengths.sum() / (time.perf_counter() - start))

    run()
    return run


class Process:
    """A server that was started here, alone in its session."""

    def __init__(self, command: list[str], environment: dict[str, str] | None = None) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (open as long as the process)
        self.process = subprocess.Popen(
            command,
            stdout=self.log,
            stderr=self.log,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )

    def wait_for(self, url: str) -> None:
        """Wait until it answers and computes nothing by itself; exit with its last lines where it ends."""
        before = float("-inf")
        while True:
            if self.process.poll() is not None:
                self.log.seek(0)
                sys.exit(f"{self.process.args} ended:\n{self.log.read()[-2000:]}")
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    if self.cpu() - before < 0.05:
                        return
                    before = self.cpu()
                    time.sleep(1)
            except httpx.HTTPError:
                time.sleep(0.2)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it and to what it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def memory(self) -> int:
        """Return its resident bytes."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * 4096

    def cpu(self) -> float:
        """Return the seconds of CPU that it has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def serve(model: Path, given: argparse.Namespace) -> tuple[Process, str]:
    """Start `rlhf serve`."""
    port = free_port()
    flags = ["--port", str(port), "--slots", str(given.slots), "--max-model-len", str(LENGTH)]
    return Process(
        [sys.executable, "-m", "rlhf_core.cli", "serve", f"{given.name}={model}", *flags]
    ), f"http://127.0.0.1:{port}"


def serve_vllm(model: Path, given: argparse.Namespace) -> tuple[Process, str]:
    """Start vLLM with the same model."""
    port = free_port()
    flags = [
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
        "--served-model-name",
        given.name,
        "--dtype",
        "float32",
    ]
    flags += ["--max-model-len", str(LENGTH), "--max-num-seqs", str(given.slots), "--enforce-eager"]
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return Process(
        [str(given.vllm), "serve", str(model), *flags], {**quiet, **cpu}
    ), f"http://127.0.0.1:{port}"


async def compare(given: argparse.Namespace, servers: dict[str, tuple[Process, str]]) -> list[dict[str, Any]]:
    """Send the same requests to several servers in turn; the others stand still meanwhile."""
    prompts = fixed_prompts(given.clients)
    rows = []
    for clients in (1, given.clients):
        for number in range(given.rounds + 1):
            row: dict[str, Any] = {"clients": clients}
            for name, (process, url) in servers.items():
                for other, _ in servers.values():
                    other.signal(signal.SIGCONT if other is process else signal.SIGSTOP)
                load = Load(url, given.name)
                some = prompts if clients > 1 else prompts[:8]
                row[name] = round(await load.work(some, 64, clients, stream=True, whole=True), 1)
                row[f"{name}_first_token"] = load.first_tokens()["first_token_median"]
                load.connections.close()
            if number:  # the first round compiles
                rows.append(row)
    return rows


def fixed_prompts(count: int) -> list[list[int]]:
    """Make prompts of 8 to 64 tokens."""
    draw = random.Random(0)
    return [[draw.randrange(3, WORDS) for _ in range(draw.randrange(8, 65))] for _ in range(count)]


async def measure(
    given: argparse.Namespace, url: str, model: Path | None, server: Process | None
) -> dict[str, Any]:
    load = Load(url, given.name, given.key)
    await load.work([[5, 6]] * 8, 8, 8)
    found: dict[str, Any] = {}
    if given.minutes:
        await load.learn()
        found["by_load"] = [await load.run(n, 20, n) for n in (1, 4, 16, 64)]
    if model is not None:
        prompts = fixed_prompts(256)
        sample, rounds = generate(model, prompts, 64), []
        for _ in range(given.rounds):
            spent = [0.0 if server is None else server.cpu(), time.process_time()]
            served = await load.work(prompts, 64, given.clients)
            spent += [0.0 if server is None else server.cpu(), time.process_time()]
            row = {"served": round(served, 1), "generate": round(sample(), 1)}
            spent.append(time.process_time())
            row |= {
                "served_cpu": round(spent[2] - spent[0], 2),
                "client_cpu": round(spent[3] - spent[1], 2),
                "generate_cpu": round(spent[4] - spent[3], 2),
            }
            rounds.append(row)
        found["fixed_work"] = rounds
        found["ratio"] = round(statistics.median(r["served"] / r["generate"] for r in rounds), 3)
    minutes = []
    for number in range(round(given.minutes)):
        row = await load.run(given.clients, 60, 100 + number)
        minutes.append({**row, **({} if server is None else {"memory_mb": server.memory() // 2**20})})
    return found | {"minutes": minutes, "answered": load.answered, "problems": dict(load.problems)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--hidden", type=int, default=256, help="hidden units of the model that is made up")
    parser.add_argument("--url", help="load this server instead of one that is started here")
    parser.add_argument(
        "--vllm", type=Path, help="the program vllm: compare it with rlhf serve, and do nothing else"
    )
    parser.add_argument("--name", default="policy")
    parser.add_argument("--key")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.vllm is not None and not given.vllm.is_file():
        sys.exit(f"--vllm {given.vllm}: not there, so nothing is compared")
    with tempfile.TemporaryDirectory() as directory:
        model = given.model or (None if given.url else make_model(Path(directory) / "model", given.hidden))
        servers: dict[str, tuple[Process, str]] = {}
        try:
            if given.url is None:
                servers["rlhf"] = serve(model, given)
            if given.vllm is not None:
                servers["vllm"] = serve_vllm(model, given)
            for process, url in servers.values():
                process.wait_for(url)
            if given.vllm is not None:
                found: Any = asyncio.run(compare(given, servers))
            else:
                server, url = servers.get("rlhf", (None, given.url))
                found = asyncio.run(measure(given, url, model, server))
        finally:
            for process, _ in servers.values():
                process.end()
    text = json.dumps(found, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
