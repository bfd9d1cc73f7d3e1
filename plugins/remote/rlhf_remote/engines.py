"""Inference engines behind a URL: completions of token ids, log-probabilities of given ids, new weights.

`rlhf serve --control` and vLLM have the same routes; SGLang has its own. Every request has a time limit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import numpy as np

from rlhf_core import RunError
from rlhf_core.errors import UNREADABLE
from rlhf_remote.service import WRONG_SETUP, describe_answer, headers, is_number, json_bytes
from rlhf_remote.transport import Answer, AnswerError, Client, shorten

T = TypeVar("T")
CONTROL_SECONDS = 600.0
"""How long an engine may take to load weights."""
HEALTH_SECONDS = 10.0
ANSWER_BYTES, TOKEN_BYTES = 2**20, 512
"""Bytes of an answer at most: so many, and so many for each id that it may have to name."""
SAMPLING_ROUTES = ("/v1/completions", "/generate")
"""Those that every engine has; they answer 404 for an adapter that is not loaded."""
SMALLEST_LOGP = float(np.finfo(np.float32).min)
LARGEST_LOGP = 1e-3
"""Log-probabilities of nearly certain tokens may be rounded to more than 0."""


class EngineDownError(Exception):
    """An engine did not answer, or not with what was asked for, or said that it cannot now; another may."""


class CompletionError(RunError):
    """An engine answered with completions that cannot be those that were asked for."""


class SampledCompletion(NamedTuple):
    """A completion: its ids, their log-probabilities at the request's temperature, and whether it ended by itself.

    versions: what the engine calls the weights that wrote it, where it says so. The ids are as the engine sent them;
    `require_logps` says whether they can be ids. engine: which of a stage's wrote it, in the order of its urls.
    """

    ids: list[int]
    logps: list[float]
    finished: bool
    versions: tuple[str, ...] = ()
    engine: int = 0


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

    def post(self, path: str, body: Any, read: Callable[[Any], T], expected: str, ids: int = 0) -> T:
        """Return what `read` makes of the JSON of an answer.

        read: raises one of UNREADABLE for JSON of another form than `expected`. ids: that the answer may have to name.
        """
        answer = self._send("POST", path, body, most_bytes=ANSWER_BYTES + TOKEN_BYTES * ids)
        return self._read(answer, read, expected)

    def get(self, path: str, read: Callable[[Any], T], expected: str) -> T:
        """Return what `read` makes of the JSON of an answer, as `post` does."""
        return self._read(self._send("GET", path), read, expected)

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

    def status(self, path: str) -> int:
        """Return the status of a request without a body, which changes nothing."""
        return self._exchange("POST", path, {}, self.timeout).status_code

    def models(self) -> dict[str, Served]:
        """Return the models that it serves, by name."""
        return self.get("/v1/models", _served, "a list of models")

    def base(self, name: str | None) -> str:
        """Return what requests call the model that it was started with. name: that the user gives it."""
        if name is not None:
            return name
        found = next((name for name, each in self.models().items() if each.parent is None), None)
        if found is None:
            raise EngineDownError(f"{self.url}/v1/models: lists no model")
        return found

    def _exchange(
        self, method: str, path: str, body: Any, seconds: float, most_bytes: int = ANSWER_BYTES
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
        most_bytes: int = ANSWER_BYTES,
    ) -> Answer:
        """Return an answer with status 200; raise what another one means."""
        answer = self._exchange(method, path, body, seconds or self.timeout, most_bytes)
        if answer.status_code == 200:
            return answer
        problem = f"{answer.url}: {describe_answer(answer)}"
        if answer.status_code in (408, 425, 429) or answer.status_code >= 500:
            raise EngineDownError(problem)
        if answer.status_code in WRONG_SETUP and path not in SAMPLING_ROUTES:
            problem += ": start it with its control routes"
        raise RunError(problem)

    def _read(self, answer: Answer, read: Callable[[Any], T], expected: str) -> T:
        try:
            return read(answer.json())
        except AnswerError as error:
            raise EngineDownError(str(error)) from error
        except UNREADABLE:
            raise EngineDownError(f"{answer.url}: expected {expected}, got {shorten(answer.text)}") from None


NEUTRAL = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""What changes nothing, as vLLM, SGLang and `rlhf serve` write it. What a request leaves out, an engine takes from
generation_config.json or its own flags.
"""
COMPLETIONS = "completions with their token_ids and logprobs"


class Vllm(HttpEngine):
    """vLLM, or `rlhf serve --control`."""

    def complete(
        self, model: str, prompt: Sequence[int], n: int, seed: int, wanted: Wanted
    ) -> list[SampledCompletion]:
        """Sample n completions of a prompt. Raises CompletionError where the answer is to another request."""
        body = {
            "model": model,
            "prompt": [list(prompt)],
            "n": n,
            "seed": seed,
            "temperature": wanted.temperature,
            "max_tokens": wanted.max_tokens,
            "min_tokens": 0,
            "stop_token_ids": list(wanted.stop_ids),
            "stop": list(wanted.stop) or None,
            "include_stop_str_in_output": True,
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            **NEUTRAL,
        }
        sent = {name: value for name, value in body.items() if value is not None}
        return self.post(
            "/v1/completions",
            sent,
            lambda answer: self._completions(answer, list(prompt), n),
            COMPLETIONS,
            ids=n * (len(prompt) + wanted.max_tokens),
        )

    def _completions(self, answer: Any, prompt: list[int], n: int) -> list[SampledCompletion]:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        require_count(self.url, [choice["index"] for choice in choices], n)
        for choice in choices:
            if choice.get("prompt_token_ids") not in (None, prompt):
                raise CompletionError(f"{self.url}: answered a prompt of other ids than were sent")
        return [self._drawn(choice) for choice in choices]

    def _drawn(self, choice: Mapping[str, Any]) -> SampledCompletion:
        logps = (choice.get("logprobs") or {}).get("token_logprobs") or []
        versions = tuple(_text(each["version"]) for each in choice.get("weight_versions") or ())
        return _completion(self.url, choice["token_ids"], logps, choice["finish_reason"], versions)

    def logps(self, model: str, ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each id but the first, given those before it, at temperature 1."""
        body = {
            "model": model,
            "prompt": [list(ids)],
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
            **NEUTRAL,
        }

        def read(answer: Any) -> list[float]:
            (choice,) = answer["choices"]
            places = choice["prompt_logprobs"][1:]
            return [_number(at[str(i)]["logprob"]) for i, at in zip(ids[1:], places, strict=True)]

        expected = f"prompt_logprobs of {len(ids)} ids"
        return self.post("/v1/completions", body, read, expected, ids=len(ids))

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
            return self.get("/server_info?config_format=json", _facts, "vllm_config")
        except RunError:  # without VLLM_SERVER_DEV_MODE, and `rlhf serve`
            return Facts()

    def weights_name(self) -> str | None:
        """Return what it calls the weights that it holds now."""
        return self.get("/weight_info", _weights_name, "weight_version")

    def knows(self, token: int, model: str) -> bool | None:
        """Tell whether its model has a token id; None where asking could harm it."""
        body = {"model": model, "prompt": [[token]], "max_tokens": 1, "temperature": 1.0, **NEUTRAL}
        try:
            return self.post(
                "/v1/completions", body, lambda answer: len(answer["choices"]) == 1, "a completion"
            )
        except RunError:
            return False

    def missing_routes(self, weights: str) -> list[str]:
        """Say which routes are missing that publishing needs."""
        route = "/v1/load_lora_adapter" if weights == "adapter" else "/collective_rpc"
        return [f"it has no route {route}"] if self.status(route) in WRONG_SETUP else []


class Sglang(HttpEngine):
    """SGLang. Methods as of `Vllm`."""

    length_flag: ClassVar[str] = "--context-length"

    def complete(
        self, model: str, prompt: Sequence[int], n: int, seed: int, wanted: Wanted
    ) -> list[SampledCompletion]:
        sampling = {
            "temperature": wanted.temperature,
            "max_new_tokens": wanted.max_tokens,
            "min_new_tokens": 0,
            "stop_token_ids": list(wanted.stop_ids),
            "stop": list(wanted.stop),
            "no_stop_trim": True,
            "ignore_eos": True,
            **NEUTRAL,
        }
        # One request per completion: those of one with `n` would all have its seed.
        body = {
            "input_ids": [list(prompt)] * n,
            "sampling_params": [{**sampling, "sampling_seed": (seed + i) % 2**31} for i in range(n)],
            "return_logprob": True,
            **({"lora_path": model} if model else {}),
        }

        def read(answer: Any) -> list[SampledCompletion]:
            if not isinstance(answer, list):
                raise TypeError
            require_count(self.url, list(range(len(answer))), n)
            return [self._drawn(each["meta_info"], len(prompt)) for each in answer]

        ids = n * (len(prompt) + wanted.max_tokens)
        return self.post("/generate", body, read, "meta_info with output_token_logprobs", ids=ids)

    def _drawn(self, about: Mapping[str, Any], length: int) -> SampledCompletion:
        if about.get("prompt_tokens") not in (None, length):
            raise CompletionError(
                f"{self.url}: answered a prompt of {shorten(str(about['prompt_tokens']))} tokens; {length} were sent"
            )
        tokens = about["output_token_logprobs"]
        versions = (_text(about["weight_version"]),) if "weight_version" in about else ()
        ids, logps = [each[1] for each in tokens], [each[0] for each in tokens]
        return _completion(self.url, ids, logps, about["finish_reason"]["type"], versions)

    def logps(self, model: str, ids: Sequence[int]) -> list[float]:
        body = {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, **NEUTRAL},
            "return_logprob": True,
            "logprob_start_len": 0,
            **({"lora_path": model} if model else {}),
        }

        def read(answer: Any) -> list[float]:
            places = answer["meta_info"]["input_token_logprobs"]
            if [each[1] for each in places] != list(ids):
                raise ValueError
            return [_number(each[0]) for each in places[1:]]

        return self.post("/generate", body, read, f"input_token_logprobs of {len(ids)} ids", ids=len(ids))

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


def _completion(url: str, ids: Any, logps: Any, reason: Any, versions: tuple[str, ...]) -> SampledCompletion:
    """Make a completion of what an engine says of it. Raises EngineDownError where it was ended from outside."""
    if not isinstance(ids, list) or not all(isinstance(i, int | float) for i in ids):
        raise TypeError
    if reason not in ("stop", "length"):
        raise EngineDownError(f"{url}: ended a completion by '{shorten(str(reason))}'")
    return SampledCompletion(ids, [_logp(p) for p in logps], reason == "stop", versions)


def _number(value: Any) -> float:
    if not is_number(value):
        raise TypeError
    return float(value)


def _logp(value: Any) -> float:
    """Return a number as it is, infinite ones included, which a message then shows."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _served(answer: Any) -> dict[str, Served]:
    """Read the answer of /v1/models."""
    served = {}
    for card in answer["data"]:
        length, parent, root = (card.get(name) for name in ("max_model_len", "parent", "root"))
        if isinstance(length, bool) or not isinstance(length, int | None):
            raise TypeError
        if not isinstance(parent, str | None) or not isinstance(root, str | None):
            raise TypeError
        served[_text(card["id"])] = Served(length, parent, root)
    return served


def _facts(answer: Any) -> Facts:
    """Read the answer of vLLM's /server_info."""
    config = answer["vllm_config"]
    if not isinstance(config, Mapping):  # a text, of versions that do not know config_format
        return Facts()
    dtype = config.get("model_config", {}).get("dtype")
    adapters = config.get("lora_config", {})
    adapters = {"max_loras": 0} if adapters is None else adapters
    most, rank = adapters.get("max_loras"), adapters.get("max_lora_rank")
    if not isinstance(most, int | None) or not isinstance(rank, int | None):
        raise TypeError
    on_cpu = config.get("device_config", {}).get("device") == "cpu"
    return Facts(None if dtype is None else _text(dtype).removeprefix("torch."), most, rank, on_cpu)


def _weights_name(answer: Any) -> str | None:
    """Read the answer of /weight_info."""
    name = answer["weight_version"]
    return None if name is None else _text(name)


def require_count(url: str, indices: Sequence[Any], n: int) -> None:
    """Raise CompletionError unless the completions of a prompt are numbered 0 … n - 1."""
    if len(indices) != n:
        raise CompletionError(f"{url}: answered with {len(indices)} completions of a prompt; asked for {n}")
    if any(isinstance(i, bool) or not isinstance(i, int) for i in indices):
        raise TypeError
    if list(indices) != list(range(n)):
        raise CompletionError(
            f"{url}: numbered {n} completions of a prompt {shorten(json.dumps(indices))}, and not 0 to {n - 1}"
        )


def require_logps(drawn: SampledCompletion, url: str, vocabulary: int) -> None:
    """Raise CompletionError for a completion whose ids or log-probabilities cannot be."""
    if len(drawn.ids) != len(drawn.logps) or not drawn.ids:
        raise CompletionError(
            f"{url}: {len(drawn.ids)} ids with {len(drawn.logps)} log-probabilities in a completion"
        )
    for token in drawn.ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise CompletionError(f"{url}: token id {json.dumps(token)} is not an integer")
        if not 0 <= token < vocabulary:
            raise CompletionError(
                f"{url}: token id {token} is out of range (vocab_size {vocabulary}): it serves another model"
            )
    for logp in drawn.logps:
        if not SMALLEST_LOGP <= logp <= LARGEST_LOGP:
            raise CompletionError(f"{url}: {logp} is not a log-probability")


def require_end(
    drawn: SampledCompletion, url: str, wanted: Wanted, stops: Callable[[Sequence[int]], bool]
) -> None:
    """Raise CompletionError for a completion that cannot have ended as its engine says.

    stops: whether the text of these ids has a stop string.
    """
    length = len(drawn.ids)
    if length > wanted.max_tokens:
        raise CompletionError(
            f"{url}: a completion has {length} tokens; asked for at most {wanted.max_tokens}"
        )
    early = next((i for i in drawn.ids[:-1] if i in wanted.stop_ids), None)
    if early is not None:
        raise CompletionError(f"{url}: a completion goes on after the stop token {early}")
    stopped = drawn.ids[-1] in wanted.stop_ids or (bool(wanted.stop) and stops(drawn.ids))
    if drawn.finished and not stopped:
        raise CompletionError(
            f"{url}: says that a completion stopped, which has no stop token or text at its end"
        )
    if not drawn.finished and length < wanted.max_tokens:
        raise CompletionError(
            f"{url}: cut a completion after {length} tokens; asked for {wanted.max_tokens}: is its context too short?"
        )


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
    (name,) = named
    length = served[name].length
    config = _config(served[name].root)
    lines = [*_of_model(engine, needs, name, length, config), *_of_weights(engine, needs, config)]
    return [f"{engine.url}: {line}" for line in lines]


def _of_model(
    engine: Engine, needs: Needs, name: str, length: int | None, config: Mapping[str, Any]
) -> Iterator[str]:
    """Say where the model that an engine serves is another one, or its context is too short."""
    asked = engine.base(name)
    # An engine takes ids of its tokenizer for its model's, so that another padding shows in its files alone.
    padded = config.get("vocab_size", needs.vocabulary) != needs.vocabulary
    if padded or engine.knows(needs.largest, asked) is False or engine.knows(needs.vocabulary, asked):
        yield f"'{name}' is another model: its vocabulary is not the policy's, of {needs.vocabulary:,} ids"
    if length is not None and length < needs.length:
        yield (
            f"'{name}' has a context of {length:,} tokens, and prompts with their completions have up to "
            f"{needs.length:,}: {engine.length_flag} {needs.length}"
        )


def _of_weights(engine: Engine, needs: Needs, config: Mapping[str, Any]) -> Iterator[str]:
    """Say why an engine could not take the policy's weights."""
    facts = engine.facts()
    if needs.weights == "adapter" and facts.adapters == 0:
        yield "it was started without adapters: --enable-lora"
    if needs.rank is not None and facts.rank is not None and facts.rank < needs.rank:
        yield f"its adapters have a rank of at most {facts.rank}: --max-lora-rank {lora_rank(needs.rank)}"
    if needs.weights == "disk" and needs.tied and facts.on_cpu and config.get("tie_word_embeddings"):
        yield (
            "vLLM on CPUs keeps the first output head of a model that shares it with the embeddings: start it with "
            "a copy that has a head of its own, rlhf export MODEL DIR --untied"
        )


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
        config = json.loads((Path(root or "") / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return {**config, **(config.get("text_config") or {})}
