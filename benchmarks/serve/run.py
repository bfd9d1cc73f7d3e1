"""Load `rlhf serve` with clients, and check everything that it answers.

    python benchmarks/serve/run.py [--clients 64] [--minutes 5] [--model DIR | --hidden 256] [--url URL] [--out FILE]

Clients ask for completions of mixed lengths, streamed or not, without pause. Every answer is checked for its form, and
some are asked again, alone, at the end: their tokens must be the same. Before that, rounds with fewer clients measure
the time to the first token, and others time fixed work against `Sampler`, as `rlhf generate` uses it, in turn. With
--url the server is another one, such as vLLM's with the same model, which has to be there already. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

LENGTH = 512
WORDS = 2000


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
        "stream": draw.random() < 0.5,
    }


class Load:
    """What clients asked and got."""

    def __init__(self, url: str, name: str, key: str | None) -> None:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=None)
        self.client = httpx.AsyncClient(base_url=url, timeout=600, limits=limits, headers=headers)
        self.name = name
        self.first: list[float] = []
        self.problems: Counter[str] = Counter()
        self.kept: list[tuple[dict[str, Any], list[int]]] = []
        self.answered = self.tokens = 0

    async def one(self, body: dict[str, Any]) -> None:
        """Send a request and check its answer."""
        try:
            tokens, reason, logps = await self.send(body)
        except (httpx.HTTPError, KeyError, ValueError, IndexError) as error:
            self.problems[f"lost: {type(error).__name__}"] += 1
            return
        self.answered += 1
        self.tokens += len(tokens)
        if reason == "length" and len(tokens) != body["max_tokens"]:
            self.problems["wrong: length"] += 1
        if reason not in ("stop", "length"):
            self.problems[f"wrong: {reason}"] += 1
        if body["logprobs"] is not None and (len(logps) != len(tokens) or max(logps) > 1e-4):
            self.problems["wrong: log-probabilities"] += 1
        if self.answered % 8 == 0 and len(self.kept) < 256:
            self.kept.append((body, tokens))

    async def send(self, body: dict[str, Any]) -> tuple[list[int], str, list[float]]:
        start = time.perf_counter()
        if not body["stream"]:
            answer = await self.client.post("/v1/completions", json=body)
            choice = answer.raise_for_status().json()["choices"][0]
            logps = choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
            return choice["token_ids"], choice["finish_reason"], logps
        tokens: list[int] = []
        logps: list[float] = []
        reason = ""
        async with self.client.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                choice = json.loads(line[6:])["choices"][0]
                if not tokens:
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
                await self.one(ask(draw, self.name))

        await asyncio.gather(*map(client, range(clients)))
        took = time.perf_counter() - begin
        first = sorted(self.first) or [float("nan")]
        return {
            "clients": clients,
            "seconds": round(took, 1),
            "requests": self.answered - answered,
            "tokens_per_second": round((self.tokens - tokens) / took, 1),
            "first_token_median": round(statistics.median(first), 3),
            "first_token_95": round(first[int(0.95 * (len(first) - 1))], 3),
        }

    async def again(self) -> int:
        """Ask what was kept again, one at a time; count the answers with other tokens."""
        different = 0
        for body, tokens in self.kept[:64]:
            found, *_ = await self.send(body)
            different += found != tokens
        return different

    async def work(self, prompts: list[list[int]], most: int, clients: int) -> float:
        """Complete each prompt, over so many connections; return tokens per second."""
        left, tokens, start = list(prompts), 0, time.perf_counter()

        async def client() -> None:
            nonlocal tokens
            while left:
                body = {
                    "model": self.name,
                    "prompt": [left.pop()],
                    "max_tokens": most,
                    "return_token_ids": True,
                }
                answer = await self.client.post("/v1/completions", json=body)
                tokens += len(answer.raise_for_status().json()["choices"][0]["token_ids"])

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


def memory(pid: int) -> int:
    """Return the resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


async def measure(given: argparse.Namespace, url: str, model: Path | None, pid: int | None) -> dict[str, Any]:
    load = Load(url, given.name, given.key)
    await load.work([[5, 6]] * 8, 8, 8)
    found: dict[str, Any] = {}
    if given.minutes:
        found["by_load"] = [await load.run(n, 10, n) for n in (1, 8, 32, 64)]
    draw = random.Random(0)
    prompts = [[draw.randrange(3, WORDS) for _ in range(draw.randrange(8, 65))] for _ in range(256)]
    if model is not None:
        sample, rounds = generate(model, prompts, 64), []
        for _ in range(given.rounds):
            served = await load.work(prompts, 64, given.clients)
            rounds.append({"served": round(served, 1), "generate": round(sample(), 1)})
        found["fixed_work"] = rounds
        found["ratio"] = round(statistics.median(r["served"] / r["generate"] for r in rounds), 3)
    minutes = []
    for number in range(round(given.minutes)):
        row = await load.run(given.clients, 60, 100 + number)
        minutes.append({**row, **({} if pid is None else {"memory_mb": memory(pid) // 2**20})})
    found |= {"minutes": minutes, "answered": load.answered, "problems": dict(load.problems)}
    found["asked_again"] = {"asked": len(load.kept[:64]), "different": await load.again()}
    return found


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
    parser.add_argument("--url")
    parser.add_argument("--name", default="policy")
    parser.add_argument("--key")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = given.model or (None if given.url else make_model(Path(directory) / "model", given.hidden))
        server = None
        url = given.url
        if url is None:
            flags = ["--port", "0", "--slots", str(given.slots), "--max-model-len", str(LENGTH)]
            command = [sys.executable, "-m", "rlhf_core.cli", "serve", f"{given.name}={model}", *flags]
            server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            assert server.stderr is not None
            line = next((line for line in server.stderr if line.startswith("serving ")), None)
            if line is None:
                sys.exit(f"the server ended with {server.wait()}")
            url = line.split()[-1]
        try:
            found = asyncio.run(measure(given, url, model, server and server.pid))
        finally:
            if server is not None:
                server.terminate()
                server.wait()
    text = json.dumps(found, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
