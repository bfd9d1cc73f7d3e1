"""Change a server's weights, adapters and pace under load, and check every token and every count.

    python benchmarks/serve/changes.py [--requests 10000] [--adapters 100] [--clients 16] [--changes 8] [--out FILE]

Starts `rlhf serve --control` with a small llama of made-up weights. Adapters are loaded under their names and asked in
turn; streams run while weights are replaced, adapters come and go, and sampling pauses; then requests of one connection
after the other show what the process keeps. The log-probabilities of every stream must be those of the weights that
`weight_versions` names for each of its tokens; the server's counters must be the client's. Prints JSON, a line each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from run import LENGTH, WORDS, Process, free_port, make_model

from rlhf_core import load_model

NAME = "policy"
VERSIONS = ("a", "b")
MADE = 10
"""Adapters that are made, at most; further names are theirs, too."""


def fill(tree: dict[str, Any], draw: np.random.Generator) -> dict[str, Any]:
    """Give adapters, which begin as zeros, an effect."""
    return {
        key: fill(value, draw)
        if isinstance(value, dict)
        else draw.normal(0, 0.3, value.shape).astype(np.float32)
        if key == "lora_b"
        else value
        for key, value in tree.items()
    }


def make_models(directory: Path, adapters: int) -> None:
    """Write two sets of weights of one model, and adapters of the first."""
    base, draw = load_model(make_model(directory / "a", 64)), np.random.default_rng(1)
    other = {**base.params, "norm": {"weight": draw.uniform(0.5, 2, 64).astype(np.float32)}}
    base.with_params(other).save(directory / "b")
    for number in range(min(adapters, MADE)):
        adapted = base.with_lora(rank=2, seed=number)
        adapted.with_params(fill(adapted.params, draw)).save(directory / "adapters" / f"n{number}")


def path_of(name: str) -> str:
    """Return the directory of the adapter of a name."""
    return f"n{int(name[1:]) % MADE}"


class Client:
    """Asks the server, and keeps count."""

    def __init__(self, url: str) -> None:
        self.client = httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None))
        self.counts: Counter[str] = Counter()
        self.answers: list[dict[str, Any]] = []

    async def control(self, path: str, body: dict[str, Any] | None = None) -> None:
        (await self.client.post(path, json=body or {})).raise_for_status()

    async def ask(self, number: int, most: int, *, model: str = NAME, stream: bool = False) -> dict[str, Any]:
        """Complete a prompt of `number`'s own."""
        draw = random.Random(number)
        prompt = [draw.randrange(3, WORDS) for _ in range(draw.randrange(4, 40))]
        body = {"model": model, "prompt": prompt, "max_tokens": most, "seed": number, "logprobs": 0}
        body |= {"return_token_ids": True, "ignore_eos": True, "stream": stream}
        tokens: list[int] = []
        logps: list[float] = []
        if stream:
            async with self.client.stream("POST", "/v1/completions", json=body) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        choice = json.loads(line[6:])["choices"][0]
                        tokens += choice["token_ids"]
                        logps += choice["logprobs"]["token_logprobs"]
        else:
            answer = await self.client.post("/v1/completions", json=body)
            choice = answer.raise_for_status().json()["choices"][0]
            tokens, logps = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        self.counts.update(requests=1, prompt_tokens=len(prompt), generation_tokens=len(tokens))
        self.counts[choice["finish_reason"]] += 1
        asked = {"model": model, "prompt": prompt, "tokens": tokens, "logps": logps, "most": most}
        return asked | {"versions": choice["weight_versions"], "reason": choice["finish_reason"]}

    async def counters(self) -> dict[str, int]:
        """Return what the server has counted."""
        text = (await self.client.get("/metrics")).text
        found: Counter[str] = Counter()
        for name, labels, value in re.findall(r"^rlhf_(\w+)_total\{(.*)\} (\S+)$", text, re.MULTILINE):
            if name == "requests" and "completions" not in labels:
                continue
            key = re.findall(r'reason="(\w+)"', labels)[0] if name == "completions" else name
            found[key] += int(float(value))
        return dict(found)


def check(directory: Path, answers: list[dict[str, Any]]) -> float:
    """Return the largest difference of a log-probability from the model's whose weights the answer names."""
    models: dict[tuple[str, str], Any] = {}
    worst = 0.0
    for answer in answers:
        spans = answer["versions"]
        if [span["start"] for span in spans] != [0, *(span["end"] for span in spans[:-1])]:
            raise AssertionError(f"spans do not follow each other: {spans}")
        if spans[-1]["end"] != len(answer["tokens"]):
            raise AssertionError(f"spans do not cover {len(answer['tokens'])} tokens: {spans}")
        for span in spans:
            adapter = None if answer["model"] == NAME else directory / "adapters" / path_of(answer["model"])
            key = span["version"], answer["model"]
            if key not in models:
                models[key] = load_model(directory / key[0], adapter=adapter)
            ids = np.zeros((1, 256), np.int32)
            context = [*answer["prompt"], *answer["tokens"]]
            ids[0, : len(context)] = context
            used = (np.arange(256) < len(context))[None].astype(np.int32)
            logits = np.asarray(models[key].logits(ids, used), np.float64)[0]
            logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            at = len(answer["prompt"]) - 1 + np.arange(span["start"], span["end"])
            expected = logps[at, np.array(answer["tokens"][span["start"] : span["end"]], int)]
            given = np.array(answer["logps"][span["start"] : span["end"]])
            worst = max(worst, float(np.abs(expected - given).max(initial=0)))
    return worst


async def use_adapters(client: Client, count: int, server: Process) -> dict[str, Any]:
    """Load adapters, and ask each alone, then all of them together."""
    before, start = server.memory(), time.perf_counter()
    for number in range(count):
        await client.control(
            "/v1/load_lora_adapter", {"lora_name": f"n{number}", "lora_path": path_of(f"n{number}")}
        )
    loaded = time.perf_counter() - start
    alone = [await client.ask(number, 8, model=f"n{number}") for number in range(count)]
    start = time.perf_counter()
    together = await asyncio.gather(*(client.ask(number, 8, model=f"n{number}") for number in range(count)))
    took = time.perf_counter() - start
    client.answers += together
    return {
        "adapters": count,
        "seconds_to_load": round(loaded, 1),
        "mb_per_adapter": round((server.memory() - before) / count / 2**20, 2),
        "different_answers": len({str(answer["tokens"]) for answer in together}),
        "same_alone": alone == list(together),
        "tokens_per_second_together": round(8 * count / took, 1),
    }


async def change_under_load(client: Client, directory: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Let clients stream while everything changes that control can change."""
    stopped, started = asyncio.Event(), client.counts["requests"]
    streamed: list[dict[str, Any]] = []

    async def stream(first: int) -> None:
        number = first
        while not stopped.is_set():
            name = NAME if number % 2 else f"n{number // 2 % given.adapters}"
            streamed.append(await client.ask(number, 48, model=name, stream=True))
            number += given.clients

    async def reload(version: str) -> None:
        await client.control("/pause?mode=keep")
        path = {"weights_path": str(directory / version)}
        await client.control("/collective_rpc", {"method": "reload_weights", "kwargs": path})
        await client.control("/reset_prefix_cache?reset_running_requests=true")
        await client.control("/update_weight_version", {"new_version": version})
        await client.control("/resume")

    tasks = [asyncio.ensure_future(stream(number)) for number in range(given.clients)]
    for round_ in range(given.changes):
        await asyncio.sleep(0.5)
        await reload(VERSIONS[1 - round_ % 2])
        name = {"lora_name": f"new{round_}"}
        await client.control("/v1/load_lora_adapter", {**name, "lora_path": "n0"})
        await client.control("/v1/unload_lora_adapter", name)
        await client.control(f"/pause?mode={('wait', 'abort')[round_ % 2]}")
        await client.control("/resume")
    stopped.set()
    await asyncio.gather(*tasks)
    whole = [answer for answer in streamed if answer["reason"] == "length"]
    client.answers += streamed
    return {
        "streams": client.counts["requests"] - started,
        "with_several_versions": sum(len(answer["versions"]) > 1 for answer in streamed),
        "aborted": sum(answer["reason"] == "abort" for answer in streamed),
        "short": sum(len(answer["tokens"]) != answer["most"] for answer in whole),
    }


async def ask_many(client: Client, requests: int, clients: int, server: Process) -> list[int]:
    """Send short requests; return the server's memory in MiB after each tenth of them."""
    left, memory = list(range(requests)), []

    async def work() -> None:
        while left:
            number = left.pop()
            await client.ask(number, 4)
            if number % (requests // 10) == 0:
                memory.append(server.memory() // 2**20)

    await asyncio.gather(*(work() for _ in range(clients)))
    return memory


def show(out: Path | None, **found: Any) -> None:
    """Print what was found, and add it to a file."""
    print(json.dumps(found), flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(found) + "\n")


async def measure(given: argparse.Namespace, directory: Path, server: Process, url: str) -> None:
    client = Client(url)
    await client.control("/update_weight_version", {"new_version": "a"})
    show(given.out, adapters=await use_adapters(client, given.adapters, server))
    show(given.out, changes=await change_under_load(client, directory, given))
    show(given.out, memory_mb=await ask_many(client, given.requests, given.clients, server))
    await asyncio.sleep(0.5)  # the last answers are counted after they were sent
    counted = await client.counters()
    show(given.out, counters=counted, same_as_client=counted == dict(client.counts))
    await client.client.aclose()
    checked = [answer for answer in client.answers if answer["tokens"]]
    show(given.out, checked=len(checked), logp_difference=check(directory, checked))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--adapters", type=int, default=100)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--changes", type=int, default=8)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        directory, port = Path(made), free_port()
        make_models(directory, given.adapters)
        flags = ["--control", "--adapters", str(directory / "adapters"), "--port", str(port)]
        flags += ["--max-adapters", str(given.adapters + 1), "--max-model-len", str(LENGTH // 2)]
        command = [sys.executable, "-m", "rlhf_core.cli", "serve", f"{NAME}={directory / 'a'}", *flags]
        server, url = Process(command), f"http://127.0.0.1:{port}"
        try:
            server.wait_for(url)
            asyncio.run(measure(given, directory, server, url))
        finally:
            server.end()


if __name__ == "__main__":
    main()
