"""What a trainer asks of an engine: completions of token ids, log-probabilities of given ids, other weights.

`rlhf serve --control` and vLLM have the same routes; SGLang has its own. Every request has a time limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import httpx

from rlhf_core import RunError
from rlhf_remote.service import WRONG_SETUP, headers, shorten, what_it_said, words

CONTROL_SECONDS = 600.0
"""How long an engine may take to load weights."""


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
    """A model of an engine. length: tokens of its context, where that is said. parent: of an adapter, its base."""

    length: int | None
    parent: str | None


@dataclass(frozen=True)
class Wanted:
    """How completions are sampled."""

    temperature: float
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


class Engine(Protocol):
    """One server. Methods raise EngineDownError where it does not answer, RunError where it refuses."""

    url: str

    def complete(self, model: str, prompt: Sequence[int], n: int, seed: int, wanted: Wanted) -> list[Drawn]:
        """Sample n completions of a prompt."""
        ...

    def logps(self, model: str, ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each id but the first, given those before it, at temperature 1."""
        ...

    def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter, in the place of one of that name; requests then name it as their model."""
        ...

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter."""
        ...

    def load_weights(self, path: str, version: str) -> None:
        """Replace the weights by those of a directory, once nothing runs."""
        ...

    def models(self) -> dict[str, Served]:
        """Return the models that it serves, by name."""
        ...

    def missing_routes(self, weights: str) -> list[str]:
        """Say which routes are missing that publishing needs."""
        ...


class HttpEngine:
    """Sends requests to one server."""

    def __init__(self, url: str, api_key: str | None, timeout: float) -> None:
        """url: as http://host:8000. timeout: seconds of a request for completions."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self._client = httpx.Client(
            headers=headers(api_key), timeout=httpx.Timeout(timeout, connect=min(timeout, 10.0))
        )

    def post(self, path: str, body: Any = None, *, seconds: float | None = None) -> Any:
        """Return the answer, as JSON where it is JSON. seconds: another time limit."""
        limit = self._client.timeout if seconds is None else seconds
        return self._answer(lambda: self._client.post(self.url + path, json=body, timeout=limit))

    def get(self, path: str) -> Any:
        """Return the answer, as JSON."""
        return self._answer(lambda: self._client.get(self.url + path))

    def status(self, path: str) -> int:
        """Return the status of a request without a body, which changes nothing."""
        try:
            return self._client.post(self.url + path, json={}).status_code
        except httpx.HTTPError as error:
            raise EngineDownError(f"{self.url}: {words(error)}") from error

    def models(self) -> dict[str, Served]:
        cards = self.get("/v1/models")["data"]
        return {card["id"]: Served(card.get("max_model_len"), card.get("parent")) for card in cards}

    def _answer(self, send: Any) -> Any:
        try:
            response: httpx.Response = send()
        except httpx.HTTPError as error:
            raise EngineDownError(f"{self.url}: {words(error)}") from error
        if response.status_code == 200:
            try:
                return response.json()
            except ValueError:
                return response.text
        problem = f"{response.request.url}: {what_it_said(response)}"
        if response.status_code in (408, 425, 429) or response.status_code >= 500:
            raise EngineDownError(problem)
        hint = ": start it with its control routes" if response.status_code in WRONG_SETUP else ""
        raise RunError(problem + hint)


class Vllm(HttpEngine):
    """vLLM, or `rlhf serve --control`."""

    def complete(self, model: str, prompt: Sequence[int], n: int, seed: int, wanted: Wanted) -> list[Drawn]:
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
        self.unload_adapter(name)
        self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, seconds=CONTROL_SECONDS)

    def unload_adapter(self, name: str) -> None:
        if name in self.models():
            self.post("/v1/unload_lora_adapter", {"lora_name": name})

    def load_weights(self, path: str, version: str) -> None:
        self.post("/pause?mode=wait&clear_cache=true", seconds=CONTROL_SECONDS)
        try:
            call = {"method": "reload_weights", "kwargs": {"weights_path": path}}
            self.post("/collective_rpc", call, seconds=CONTROL_SECONDS)
            self.post("/reset_prefix_cache?reset_running_requests=true")
            self.post("/update_weight_version", {"new_version": version})
        finally:
            self.post("/resume")

    def missing_routes(self, weights: str) -> list[str]:
        route = "/v1/load_lora_adapter" if weights == "adapter" else "/collective_rpc"
        return [f"it has no route {route}"] if self.status(route) in WRONG_SETUP else []


class Sglang(HttpEngine):
    """SGLang."""

    def complete(self, model: str, prompt: Sequence[int], n: int, seed: int, wanted: Wanted) -> list[Drawn]:
        sampling = {
            "n": n,
            "sampling_seed": seed,
            "temperature": wanted.temperature,
            "max_new_tokens": wanted.max_tokens,
            "stop_token_ids": list(wanted.stop_ids),
            "stop": list(wanted.stop),
            "no_stop_trim": True,
        }
        body = {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True}
        if model:
            body["lora_path"] = model
        answer = self.post("/generate", body)
        return [self._drawn(each) for each in (answer if isinstance(answer, list) else [answer])]

    def _drawn(self, answer: Mapping[str, Any]) -> Drawn:
        about = answer["meta_info"]
        reason = about["finish_reason"]["type"]
        if reason not in ("stop", "length"):
            raise EngineDownError(f"{self.url}: ended a completion by '{reason}'")
        tokens = about["output_token_logprobs"]
        return Drawn([each[1] for each in tokens], [each[0] for each in tokens], reason == "stop")

    def logps(self, model: str, ids: Sequence[int]) -> list[float]:
        body = {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        if model:
            body["lora_path"] = model
        return [each[0] for each in self.post("/generate", body)["meta_info"]["input_token_logprobs"][1:]]

    def load_adapter(self, name: str, path: str) -> None:
        self.unload_adapter(name)
        self.post("/load_lora_adapter", {"lora_name": name, "lora_path": path}, seconds=CONTROL_SECONDS)

    def unload_adapter(self, name: str) -> None:
        if name in self.models():
            self.post("/unload_lora_adapter", {"lora_name": name})

    def load_weights(self, path: str, version: str) -> None:
        body = {
            "model_path": path,
            "weight_version": version,
            "flush_cache": True,
            "abort_all_requests": False,
        }
        self.post("/pause_generation", {"mode": "retract"}, seconds=CONTROL_SECONDS)
        try:
            self.post("/update_weights_from_disk", body, seconds=CONTROL_SECONDS)
        finally:
            self.post("/continue_generation", {})

    def missing_routes(self, weights: str) -> list[str]:
        route = "/load_lora_adapter" if weights == "adapter" else "/update_weights_from_disk"
        return [f"it has no route {route}"] if self.status(route) in WRONG_SETUP else []


KINDS: dict[str, type[Vllm | Sglang]] = {"vllm": Vllm, "rlhf": Vllm, "sglang": Sglang}


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
