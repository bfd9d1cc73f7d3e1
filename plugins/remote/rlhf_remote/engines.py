"""What a trainer asks of an engine: completions of token ids, log-probabilities of given ids, other weights.

`rlhf serve --control` and vLLM have the same routes; SGLang has its own. Every request has a time limit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

from rlhf_core import RunError
from rlhf_remote.service import WRONG_SETUP, headers, json_bytes, what_it_said
from rlhf_remote.transport import MOST_BYTES, Answer, AnswerError, Client, shorten

CONTROL_SECONDS = 600.0
"""How long an engine may take to load weights."""
HEALTH_SECONDS = 10.0


class EngineDownError(Exception):
    """An engine did not answer, or answered that it cannot now; another may."""


class Drawn(NamedTuple):
    """A completion: its ids, their log-probabilities at the request's temperature, and whether it ended by itself.

    versions: what the engine calls the weights that wrote it, where it says so.
    """

    ids: list[int]
    logps: list[float]
    finished: bool
    versions: tuple[str, ...] = ()


class Served(NamedTuple):
    """A model of an engine. length: tokens of its context. parent: of an adapter, its base. root: where it came from.

    None: the engine does not say.
    """

    length: int | None
    parent: str | None
    root: str | None = None


class Facts(NamedTuple):
    """What an engine says of itself beyond its models; None: it does not say.

    dtype: that it computes in. adapters: how many one batch may use, 0 where they are off. rank: their largest.
    on_cpu: whether it is vLLM's build for CPUs.
    """

    dtype: str | None = None
    adapters: int | None = None
    rank: int | None = None
    on_cpu: bool = False


class Needs(NamedTuple):
    """What a stage needs of its engines.

    weights: how policies are published. model: the name of the base, where the user gives it. largest: the largest id
    of the policy's tokens, below vocabulary. length: tokens of the longest prompt with its completion. rank: of the
    adapters. tied: whether the output head is the embeddings.
    """

    weights: str
    model: str | None
    largest: int
    vocabulary: int
    length: int
    rank: int | None
    tied: bool


@dataclass(frozen=True)
class Wanted:
    """How completions are sampled."""

    temperature: float
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


class HttpEngine:
    """One server. Methods raise EngineDownError where it does not answer, RunError where it refuses."""

    length_flag: ClassVar[str] = "--max-model-len"
    """Sets the length of its context."""

    def __init__(self, url: str, api_key: str | None, timeout: float) -> None:
        """url: as http://host:8000. timeout: seconds of a request for completions."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.timeout = timeout
        self._client = Client(headers(api_key))

    def post(
        self, path: str, body: Any = None, *, seconds: float | None = None, most_bytes: int = MOST_BYTES
    ) -> Any:
        """Return the JSON of an answer. seconds: another time limit."""
        return self._json(self._send("POST", path, body, seconds or self.timeout, most_bytes))

    def command(self, path: str, body: Any = None) -> None:
        """Ask for a change of what the engine holds. Raises RunError where it refuses.

        vLLM refuses with 500; an engine that broke says so at /health.
        """
        try:
            self._send("POST", path, body, CONTROL_SECONDS)
        except EngineDownError as error:
            with suppress(AnswerError):
                if self._client.send("GET", self.url + "/health", seconds=HEALTH_SECONDS).status_code == 200:
                    raise RunError(f"{error}; the engine's log says why; is it of another model?") from error
            raise

    def get(self, path: str) -> Any:
        """Return the JSON of an answer."""
        return self._json(self._send("GET", path))

    def status(self, path: str) -> int:
        """Return the status of a request without a body, which changes nothing."""
        return self._exchange("POST", path, {}, self.timeout).status_code

    def models(self) -> dict[str, Served]:
        """Return the models that it serves, by name."""
        cards = self.get("/v1/models")["data"]
        return {
            card["id"]: Served(card.get("max_model_len"), card.get("parent"), card.get("root"))
            for card in cards
        }

    def base(self, name: str | None) -> str:
        """Return what requests call the model that it was started with. name: that the user gives it."""
        return name or next(name for name, each in self.models().items() if each.parent is None)

    def _exchange(
        self, method: str, path: str, body: Any, seconds: float, most_bytes: int = MOST_BYTES
    ) -> Answer:
        content = None if body is None else json_bytes(body)
        try:
            return self._client.send(method, self.url + path, content, seconds=seconds, most_bytes=most_bytes)
        except AnswerError as error:
            raise EngineDownError(f"{self.url}: {error.problem}") from error

    def _send(
        self,
        method: str,
        path: str,
        body: Any = None,
        seconds: float | None = None,
        most_bytes: int = MOST_BYTES,
    ) -> Answer:
        """Return an answer with status 200; raise what another one means."""
        answer = self._exchange(method, path, body, seconds or self.timeout, most_bytes)
        if answer.status_code == 200:
            return answer
        problem = f"{answer.url}: {what_it_said(answer)}"
        if answer.status_code in (408, 425, 429) or answer.status_code >= 500:
            raise EngineDownError(problem)
        hint = ": start it with its control routes" if answer.status_code in WRONG_SETUP else ""
        raise RunError(problem + hint)

    def _json(self, answer: Answer) -> Any:
        try:
            return answer.json()
        except AnswerError as error:
            raise EngineDownError(str(error)) from error


NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True}
"""What a request leaves out an engine takes from generation_config.json; the ends of a completion are named."""


class Vllm(HttpEngine):
    """vLLM, or `rlhf serve --control`."""

    def complete(self, model: str, prompt: Sequence[int], n: int, seed: int, wanted: Wanted) -> list[Drawn]:
        """Sample n completions of a prompt."""
        body = {
            "model": model,
            "prompt": [list(prompt)],
            "n": n,
            "seed": seed,
            "temperature": wanted.temperature,
            "max_tokens": wanted.max_tokens,
            "stop_token_ids": list(wanted.stop_ids),
            "stop": list(wanted.stop) or None,
            "include_stop_str_in_output": True,
            "logprobs": 0,
            "return_token_ids": True,
            **NEUTRAL,
        }
        choices = self.post("/v1/completions", {k: v for k, v in body.items() if v is not None})["choices"]
        return [self._drawn(choice) for choice in sorted(choices, key=lambda choice: choice["index"])]

    def _drawn(self, choice: Mapping[str, Any]) -> Drawn:
        reason = choice["finish_reason"]
        if reason not in ("stop", "length"):
            raise EngineDownError(f"{self.url}: ended a completion by '{reason}'")
        logps = (choice.get("logprobs") or {}).get("token_logprobs") or []
        versions = tuple(each["version"] for each in choice.get("weight_versions") or ())
        return Drawn(choice["token_ids"], logps, reason == "stop", versions)

    def logps(self, model: str, ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each id but the first, given those before it, at temperature 1."""
        body = {
            "model": model,
            "prompt": [list(ids)],
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
        }
        (choice,) = self.post("/v1/completions", body)["choices"]
        return [
            float(of_place[str(token)]["logprob"])
            for token, of_place in zip(ids[1:], choice["prompt_logprobs"][1:], strict=True)
        ]

    def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter, in the place of one of that name; requests then name it as their model."""
        self.unload_adapter(name)
        self.command("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter."""
        if name in self.models():
            self.command("/v1/unload_lora_adapter", {"lora_name": name})

    def load_weights(self, path: str, version: str) -> None:
        """Replace the weights by those of a directory, once nothing runs."""
        self.command("/pause?mode=wait&clear_cache=true")
        try:
            self.command("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
            self.command("/reset_prefix_cache?reset_running_requests=true")
            self.command("/update_weight_version", {"new_version": version})
        finally:
            self.command("/resume")

    def facts(self) -> Facts:
        """Ask how it was started."""
        try:
            told = self.get("/server_info?config_format=json")["vllm_config"]
        except RunError:  # without VLLM_SERVER_DEV_MODE, and `rlhf serve`
            return Facts()
        adapters = told["lora_config"] or {"max_loras": 0, "max_lora_rank": None}
        return Facts(
            told["model_config"]["dtype"].removeprefix("torch."),
            adapters["max_loras"],
            adapters["max_lora_rank"],
            told["device_config"]["device"] == "cpu",
        )

    def weights_name(self) -> str | None:
        """Return what it calls the weights that it holds now."""
        name: str | None = self.get("/weight_info")["weight_version"]
        return name

    def knows(self, token: int, model: str) -> bool | None:
        """Tell whether its model has a token id; None where asking could harm it."""
        try:
            self.post("/v1/completions", {"model": model, "prompt": [[token]], "max_tokens": 1})
        except RunError:
            return False
        return True

    def missing_routes(self, weights: str) -> list[str]:
        """Say which routes are missing that publishing needs."""
        route = "/v1/load_lora_adapter" if weights == "adapter" else "/collective_rpc"
        return [f"it has no route {route}"] if self.status(route) in WRONG_SETUP else []


class Sglang(HttpEngine):
    """SGLang. Methods as of `Vllm`."""

    length_flag: ClassVar[str] = "--context-length"

    def complete(self, model: str, prompt: Sequence[int], n: int, seed: int, wanted: Wanted) -> list[Drawn]:
        sampling = {
            "temperature": wanted.temperature,
            "max_new_tokens": wanted.max_tokens,
            "stop_token_ids": list(wanted.stop_ids),
            "stop": list(wanted.stop),
            "no_stop_trim": True,
            **NEUTRAL,
        }
        # One request per completion: those of one with `n` would all have its seed.
        body = {
            "input_ids": [list(prompt)] * n,
            "sampling_params": [{**sampling, "sampling_seed": (seed + i) % 2**31} for i in range(n)],
            "return_logprob": True,
            **({"lora_path": model} if model else {}),
        }
        return [self._drawn(each) for each in self.post("/generate", body)]

    def _drawn(self, answer: Mapping[str, Any]) -> Drawn:
        about = answer["meta_info"]
        reason = about["finish_reason"]["type"]
        if reason not in ("stop", "length"):
            raise EngineDownError(f"{self.url}: ended a completion by '{reason}'")
        tokens = about["output_token_logprobs"]
        versions = (about["weight_version"],) if "weight_version" in about else ()
        return Drawn([each[1] for each in tokens], [each[0] for each in tokens], reason == "stop", versions)

    def logps(self, model: str, ids: Sequence[int]) -> list[float]:
        body = {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            **({"lora_path": model} if model else {}),
        }
        return [each[0] for each in self.post("/generate", body)["meta_info"]["input_token_logprobs"][1:]]

    def load_adapter(self, name: str, path: str) -> None:
        with suppress(RunError):  # it has none of this name
            self.unload_adapter(name)
        self.command("/load_lora_adapter", {"lora_name": name, "lora_path": path})

    def unload_adapter(self, name: str) -> None:
        self.command("/unload_lora_adapter", {"lora_name": name})

    def load_weights(self, path: str, version: str) -> None:
        body = {
            "model_path": path,
            "weight_version": version,
            "flush_cache": True,
            "abort_all_requests": False,
        }
        self.command("/pause_generation", {"mode": "retract"})
        try:
            self.command("/update_weights_from_disk", body)
        finally:
            self.command("/continue_generation", {})

    def facts(self) -> Facts:
        return Facts()

    def weights_name(self) -> str | None:
        return None  # completions say it

    def base(self, name: str | None) -> str:
        return ""  # a name is an adapter's

    def knows(self, token: int, model: str) -> bool | None:
        return None

    def missing_routes(self, weights: str) -> list[str]:
        route = "/load_lora_adapter" if weights == "adapter" else "/update_weights_from_disk"
        return [f"it has no route {route}"] if self.status(route) in WRONG_SETUP else []


Engine: TypeAlias = Vllm | Sglang
KINDS: dict[str, type[Engine]] = {"vllm": Vllm, "rlhf": Vllm, "sglang": Sglang}


def require_logps(drawn: Drawn, url: str, vocabulary: int) -> None:
    """Raise RunError for a completion whose ids or log-probabilities cannot be."""
    if len(drawn.ids) != len(drawn.logps) or not drawn.ids:
        raise RunError(
            f"{url}: {len(drawn.ids)} ids with {len(drawn.logps)} log-probabilities in a completion"
        )
    if odd := [i for i in drawn.ids if not 0 <= i < vocabulary]:
        raise RunError(
            f"{url}: token id {odd[0]} is out of range (vocab_size {vocabulary}): it serves another model"
        )
    if odd_logps := [p for p in drawn.logps if not math.isfinite(p) or p > 1e-3]:
        raise RunError(f"{url}: {shorten(str(odd_logps[0]))} is not a log-probability")


def problems(engine: Engine, needs: Needs) -> list[str]:
    """Say what is wrong with an engine that answers, each with the flag that it is started with.

    Raises EngineDownError where it does not answer.
    """
    try:
        missing = engine.missing_routes(needs.weights)
        served = {name: each for name, each in engine.models().items() if each.parent is None}
    except RunError as error:
        return [str(error)]
    if missing:
        return [f"{engine.url}: {line}" for line in missing]
    named = list(served) if needs.model is None else [needs.model]
    if needs.model is not None and needs.model not in served:
        return [f"{engine.url} serves {', '.join(served)}, and not '{needs.model}': give sampler.model"]
    if len(named) != 1:
        return [f"{engine.url} serves {', '.join(served)}: name one, sampler.model"]
    found = []
    (name,), facts, asked = named, engine.facts(), engine.base(named[0])
    length, config = served[name].length, _config(served[name].root)
    # An engine takes ids of its tokenizer for its model's, so that another padding shows in its files alone.
    padded = config.get("vocab_size", needs.vocabulary) != needs.vocabulary
    if padded or engine.knows(needs.largest, asked) is False or engine.knows(needs.vocabulary, asked):
        found.append(
            f"'{name}' is another model: its vocabulary is not the policy's, of {needs.vocabulary:,} ids"
        )
    if length is not None and length < needs.length:
        found.append(
            f"'{name}' has a context of {length:,} tokens, and prompts with their completions have up to "
            f"{needs.length:,}: {engine.length_flag} {needs.length}"
        )
    if needs.weights == "adapter" and facts.adapters == 0:
        found.append("it was started without adapters: --enable-lora")
    if needs.rank is not None and facts.rank is not None and facts.rank < needs.rank:
        found.append(
            f"its adapters have a rank of at most {facts.rank}: --max-lora-rank {lora_rank(needs.rank)}"
        )
    if needs.weights == "disk" and needs.tied and facts.on_cpu and config.get("tie_word_embeddings"):
        found.append(
            "vLLM on CPUs keeps the first output head of a model that shares it with the embeddings: start it with "
            "a copy that has a head of its own, rlhf export MODEL DIR --untied"
        )
    return [f"{engine.url}: {line}" for line in found]


def dtype_of(definition: Any) -> str | None:
    """Name the dtype that the trainer computes in; None: a model of a plugin does not say."""
    dtype = getattr(definition, "compute_dtype", None)
    return None if dtype is None else np.dtype(dtype).name


def lora_rank(rank: int) -> int:
    """Return the value of vLLM's --max-lora-rank, one of a few, for adapters of this rank."""
    return min((each for each in (8, 16, 32, 64, 128, 256, 320, 512) if each >= rank), default=rank)


def _config(root: str | None) -> Mapping[str, Any]:
    """Read the config of the model that an engine was started with; {} where its files are elsewhere."""
    try:
        told = json.loads((Path(root or "") / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return {**told, **(told.get("text_config") or {})}
