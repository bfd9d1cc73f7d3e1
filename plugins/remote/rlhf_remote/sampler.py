"""The samplers `vllm`, `sglang` and `rlhf`: rollouts from engines that the trainer publishes its policy to."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import httpx
import jax
import numpy as np
from pydantic import Field

from rlhf_core import InputError, Rollouts, RunError
from rlhf_core.contracts import Forecast
from rlhf_core.errors import Stopped
from rlhf_remote.engines import KINDS, Drawn, EngineDownError, Wanted, require_logps
from rlhf_remote.service import address_problem

T = TypeVar("T")
PROBE = (2, 24)
"""Sequences and ids of the probe that every engine scores after every publication."""
FIRST_WAIT, LONGEST_WAIT = 1.0, 30.0
"""Seconds before an engine that failed is tried again, doubled each time up to the second number."""
ASK_SECONDS = 10.0
POLL_SECONDS = 0.02
"""Between two looks at requests while environments answer."""
PREFIX = "policy-"
"""Begins the name of every policy that a run publishes."""
PROBE_FILE = "probe.npz"
OWNER_FILE = "owner.json"
CAUSES = (
    "the usual causes: it holds older weights, an adapter was not loaded, another dtype or model; vLLM on CPUs keeps "
    "the old head of models with tied embeddings"
)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Normalise logits along the last axis, float64."""
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


@dataclass(frozen=True)
class Policy:
    """A policy that was published. name: of the adapter, which no other run has on the same engine."""

    name: str
    path: Path
    version: int


@dataclass(frozen=True)
class EngineSampler:
    """Sample with engines behind URLs, which are given each policy before they sample for it.

    urls: of engines that serve the model that training starts from. weights: how a policy is published: "adapter",
    under a name of its own, or "disk", whole weights that the engines reload. directory: where to, which engines must
    see at the same path; default: in the run directory. model: the name that engines serve the base under; default:
    their only model. timeout: seconds of a request. patience: seconds without any engine before the run stops, its
    state saved. probe_tolerance: the largest difference between an engine's and the trainer's log-probabilities of a
    probe, nats; 1e-3 is possible in float32. concurrency: requests at a time, per engine. api_key: of the engines.
    """

    urls: Annotated[tuple[str, ...], Field(min_length=1)]
    weights: Literal["adapter", "disk"] = "adapter"
    directory: str | None = None
    model: str | None = None
    timeout: Annotated[float, Field(gt=0)] = 600.0
    patience: Annotated[float, Field(ge=0)] = 300.0
    probe_tolerance: Annotated[float, Field(gt=0)] = 0.2
    concurrency: Annotated[int, Field(ge=1)] = 64
    api_key: str | None = field(default=None, repr=False)

    engine: ClassVar[str]
    outside: ClassVar[bool] = True
    """Nothing of it is in the memory of the trainer's devices."""

    def __call__(self, inputs: Any) -> Sampler:
        self._require(inputs.definition, inputs.options)
        return Sampler(self, inputs)

    def check(self, model: Any, sampling: Any) -> Forecast:
        """Ask the engines what they serve. Raises InputError for wrong engines, and settings that none can follow."""
        self._require(model.definition, sampling)
        problems: list[str] = []
        warnings: list[str] = []
        for url in self.urls:
            engine = KINDS[self.engine](url, self.api_key, ASK_SECONDS)
            try:
                served = {name: each for name, each in engine.models().items() if each.parent is None}
                missing = engine.missing_routes(self.weights)
            except EngineDownError as error:
                warnings.append(f"sampler.urls: {error}; start it: {self._command(model)}")
                continue
            except RunError as error:
                problems.append(f"urls: {error}")
                continue
            problems += [f"urls: {url}: {line}; start it: {self._command(model)}" for line in missing]
            named = [self.model] if self.model is not None else list(served)
            if self.model is not None and self.model not in served:
                problems.append(f"model: {url} serves {', '.join(served)}, and not '{self.model}'")
            elif self.weights == "disk" and len(named) != 1:
                problems.append(f"model: {url} serves {', '.join(served)}; name one")
            room = [each.length for name, each in served.items() if name in named and each.length is not None]
            if room and min(room) <= sampling.max_completion_length:
                problems.append(
                    f"urls: {url} has a context of {min(room):,}, too short for completions of "
                    f"{sampling.max_completion_length:,} tokens"
                )
        if problems:
            raise InputError(*problems)
        where = self.directory or "the stage's directory"
        what = "adapters" if self.weights == "adapter" else "whole weights"
        line = f"sampled by {len(self.urls)} × {self.engine}, which read each policy ({what}) from {where}"
        return Forecast((line,), tuple(warnings))

    def _command(self, model: Any) -> str:
        """Write the command that starts an engine for this stage."""
        source, lora = getattr(model, "source", None) or "MODEL", model.definition.lora
        port = httpx.URL(self.urls[0]).port or 8000
        if self.engine == "rlhf":
            adapters = f" --adapters {self.directory or 'RUN'}" if lora else ""
            return f"rlhf serve {source} --port {port} --control{adapters}"
        if self.engine == "sglang":
            adapters = " --enable-lora" if lora else ""
            return f"python -m sglang.launch_server --model-path {source} --port {port}{adapters}"
        adapters = f" --enable-lora --max-loras 3 --max-lora-rank {lora.rank}" if lora else ""
        return (
            "VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve "
            f"{source} --port {port} --logprobs-mode processed_logprobs{adapters}"
        )

    def _require(self, definition: Any, sampling: Any) -> None:
        """Raise InputError for what engines cannot do exactly."""
        neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        problems = [
            f"sampling.{name}: the log-probabilities of sampler '{self.engine}' would contain it; leave it out"
            for name, value in neutral.items()
            if getattr(sampling, name) not in (None, value)
        ]
        problems += filter(None, map(address_problem, self.urls))
        if self.weights == "adapter" and definition.lora is None:
            problems.append(
                'sampler.weights = "adapter": the model is trained without adapters; add lora, or write '
                'weights = "disk"'
            )
        if self.weights == "disk" and definition.lora is not None:
            problems.append(
                'sampler.weights = "disk" publishes whole weights, and the stage trains adapters: write '
                'weights = "adapter"'
            )
        if jax.process_count() > 1:
            problems.append(f"sampler '{self.engine}': the trainer must be one process")
        if problems:
            raise InputError(*problems)


@dataclass(frozen=True)
class VllmSampler(EngineSampler):
    """Sample with vLLM servers. Options as of `EngineSampler`."""

    engine = "vllm"


@dataclass(frozen=True)
class SglangSampler(EngineSampler):
    """Sample with SGLang servers. Options as of `EngineSampler`."""

    engine = "sglang"


@dataclass(frozen=True)
class RlhfSampler(EngineSampler):
    """Sample with `rlhf serve --control`. Options as of `EngineSampler`."""

    engine = "rlhf"


class Station:
    """One engine, which policies it holds, and whether it answers."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.url = engine, engine.url
        self.changed = threading.Condition()
        self.loaded: set[str] = set()
        self.shown: dict[str, tuple[float, float]] = {}
        """{policy: (the largest difference of its newest receipt, seconds that loading it took)}"""
        self.active = self.failures = 0
        self.retry_at = 0.0

    @contextmanager
    def holding(self, policy: Policy, load: Callable[[], None], *, exclusive: bool) -> Iterator[None]:
        """Keep a policy loaded inside the block, whose receipt `load` has checked.

        exclusive: the engine holds one policy at a time: wait until nothing runs with another one.
        """
        with self.changed:
            while exclusive and self.active and policy.name not in self.loaded:
                self.changed.wait()
            if policy.name not in self.loaded:
                if exclusive:
                    self.loaded.clear()
                load()
                self.loaded.add(policy.name)
            self.active += 1
        try:
            yield
        finally:
            with self.changed:
                self.active -= 1
                self.changed.notify_all()

    def fail(self) -> None:
        """Leave the engine out for a while; it must show a receipt again."""
        with self.changed:
            self.loaded.clear()
            self.failures += 1
            self.retry_at = time.monotonic() + min(FIRST_WAIT * 2 ** (self.failures - 1), LONGEST_WAIT)


_STATIONS: dict[tuple[str, ...], list[Station]] = {}
"""Stations by engine, address and key: samplers of training, evaluation and previews share what engines hold."""


class Sampler:
    """Publishes policies to engines and samples with them, from any number of threads."""

    def __init__(self, options: EngineSampler, inputs: Any) -> None:
        self.options, self.inputs = options, inputs
        self.directory = Path(options.directory or inputs.directory / "policies").absolute()
        kind = KINDS[options.engine]
        key = (options.engine, options.api_key or "", *options.urls)
        if key not in _STATIONS:
            _STATIONS[key] = [Station(kind(url, options.api_key, options.timeout)) for url in options.urls]
        self.stations = _STATIONS[key]
        self._tag = hashlib.sha256(str(inputs.directory).encode()).hexdigest()[:8]
        self._names: dict[str, str] = {}
        self._choosing = threading.Lock()
        self._threads = ThreadPoolExecutor(options.concurrency * len(self.stations))
        draw = np.random.default_rng(0)
        self.probe = draw.integers(0, inputs.definition.vocab_size, PROBE)
        for start, stop in inputs.definition.absent:
            self.probe[(self.probe >= start) & (self.probe < stop)] = 0
        sampling = inputs.options
        self.wanted = Wanted(
            sampling.temperature,
            sampling.max_completion_length,
            tuple(dict.fromkeys((*inputs.stop_ids, *sampling.stop_token_ids))),
            tuple(sampling.stop_strings),
        )

    def publish(self, params: Any, version: int) -> Policy:
        """Write a policy for the engines, with the trainer's own log-probabilities of the probe."""
        policy = self._policy(version)
        if (policy.path / PROBE_FILE).is_file():
            return policy
        self._claim()
        model = self.inputs.model.with_params(params)
        logits = np.asarray(model.logits(self.probe, np.ones_like(self.probe)), np.float64)
        own = np.take_along_axis(log_softmax(logits[:, :-1]), self.probe[:, 1:, None], -1)[..., 0]
        unfinished = policy.path.with_name(f".{policy.path.name}.tmp")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.rmtree(policy.path, ignore_errors=True)
        try:
            model.save(unfinished)
            np.savez(unfinished / PROBE_FILE, ids=self.probe, logps=own, last=logits[0, -1])
            unfinished.rename(policy.path)
        except OSError as error:
            raise RunError(f"sampler.directory: {self.directory}: {error.strerror or error}") from error
        return policy

    def receipt(self, policy: Policy) -> dict[str, float]:
        """Return what engines showed for a policy: the largest difference of the probe, and seconds of the slowest."""
        shown = [each.shown[policy.name] for each in self.stations if policy.name in each.shown]
        differences, seconds = zip(*shown, strict=True)
        return {"sync/probe_difference": max(differences), "sync/seconds": max(seconds)}

    def published(self, version: int) -> Policy:
        """Find a policy that was published before the run was stopped. Raises InputError where it is gone."""
        policy = self._policy(version)
        if not (policy.path / PROBE_FILE).is_file():
            raise InputError(
                f"{policy.path} is missing: a rollout was being sampled with it; restore the directory"
            )
        return policy

    def retire(self, before: int) -> None:
        """Forget policies of lower versions than `before`, but for the newest of these."""
        versions = sorted(int(path.name.rpartition("-v")[2]) for path in self.directory.glob("policy-v*"))
        for version in [each for each in versions if each < before][:-1]:
            policy = self._policy(version)
            for station in self.stations if self.options.weights == "adapter" else ():
                with station.changed:
                    held = policy.name in station.loaded
                    station.loaded.discard(policy.name)
                if held:
                    with suppress(
                        EngineDownError, RunError
                    ):  # it has forgotten it by itself, or will be loaded anew
                        station.engine.unload_adapter(policy.name)
            (policy.path / PROBE_FILE).unlink(missing_ok=True)  # without it, what a kill leaves is no policy
            shutil.rmtree(policy.path, ignore_errors=True)

    def __call__(
        self, params: Policy, prompts: Sequence[np.ndarray], key: Any, ids: np.ndarray | None = None
    ) -> Rollouts:
        """Sample completions. params: what `publish` returned."""
        n = self.inputs.num_generations
        numbers = np.arange(len(prompts) * n) if ids is None else np.asarray(ids)
        words = np.asarray(jax.random.key_data(key)).reshape(-1).tolist()

        def of_prompt(i: int) -> list[Drawn]:
            seed = int(np.random.SeedSequence([*words, int(numbers[i * n])]).generate_state(1)[0] >> 1)
            prompt = prompts[i].tolist()
            return self._anywhere(
                params, lambda engine, model: engine.complete(model, prompt, n, seed, self.wanted)
            )

        drawn = [each for group in self._threads.map(of_prompt, range(len(prompts))) for each in group]
        return self._rollouts(drawn)

    def converse(
        self, params: Policy, prompts: Sequence[np.ndarray], key: Any, ids: np.ndarray, world: Any
    ) -> None:
        """Sample the turns of conversations with `world`, each as soon as its own conversation is ready.

        A turn's random numbers go by the number of its conversation and its own. Arguments as of `SamplerFunction`.
        """
        words = np.asarray(jax.random.key_data(key)).reshape(-1).tolist()
        contexts, turns = [np.asarray(prompt, np.int32) for prompt in prompts], [0] * len(prompts)
        asked: dict[Future[list[Drawn]], int] = {}
        answering = set[int]()

        def ask(number: int, limit: int) -> None:
            entropy = [*words, int(ids[number]), *([turns[number]] if turns[number] else [])]
            seed = int(np.random.SeedSequence(entropy).generate_state(1)[0] >> 1)
            prompt, wanted = contexts[number].tolist(), replace(self.wanted, max_tokens=limit)
            request = self._threads.submit(
                self._anywhere, params, lambda engine, model: engine.complete(model, prompt, 1, seed, wanted)
            )
            asked[request] = number

        first = min(self.wanted.max_tokens, self.inputs.conversation_length or self.wanted.max_tokens)
        for number in range(len(prompts)):
            ask(number, first)
        while asked or answering:
            done, _ = futures.wait(asked, POLL_SECONDS if answering else None, futures.FIRST_COMPLETED)
            for request in done:
                number = asked.pop(request)
                (drawn,) = request.result()
                tokens = np.array(drawn.ids, np.int32)
                contexts[number] = np.concatenate([contexts[number], tokens])
                answering.add(number)
                world.submit(number, tokens, np.array(drawn.logps, np.float32), drawn.finished)
            for reply in world.replies(wait=not asked):
                answering.remove(number := reply.conversation)
                if reply.tokens is not None:
                    before = contexts[number][:0] if reply.replaces else contexts[number]
                    contexts[number] = np.concatenate([before, reply.tokens])
                    turns[number] += 1
                    ask(number, reply.limit)

    def _rollouts(self, drawn: Sequence[Drawn]) -> Rollouts:
        width = self.wanted.max_tokens
        tokens, logps = np.zeros((len(drawn), width), np.int32), np.zeros((len(drawn), width), np.float32)
        for row, each in enumerate(drawn):
            tokens[row, : len(each.ids)], logps[row, : len(each.ids)] = each.ids, each.logps
        lengths = np.array([len(each.ids) for each in drawn], np.int32)
        return Rollouts(tokens, lengths, logps, np.array([each.finished for each in drawn]))

    def _anywhere(self, policy: Policy, ask: Callable[[Any, str], list[Drawn]]) -> list[Drawn]:
        """Ask the engine with the least to do; where one does not answer, another."""
        since, problem = time.monotonic(), ""
        exclusive = self.options.weights == "disk"
        while True:
            station = self._choose()
            if station is not None:
                try:
                    with station.holding(policy, partial(self._load, station, policy), exclusive=exclusive):
                        drawn = self._ask(station, policy, ask)
                    for each in drawn:
                        others = {*each.versions} - {policy.name} if exclusive else ()
                        if any(not name.startswith(PREFIX) for name in others):
                            raise EngineDownError(f"{station.url}: was restarted")
                        if others:
                            raise RunError(
                                f"{station.url}: its weights are now called '{each.versions[-1]}', and this run loaded "
                                f"'{policy.name}': give each run engines of its own, or publish adapters"
                            )
                        require_logps(each, station.url, self.inputs.definition.vocab_size)
                        if len(each.ids) > self.wanted.max_tokens:
                            raise RunError(f"{station.url}: a completion is longer than it may be")
                    station.failures = 0
                    return drawn
                except EngineDownError as error:
                    station.fail()
                    problem = str(error)
            elif time.monotonic() - since > self.options.patience:
                raise Stopped(
                    f"no engine has answered for {self.options.patience:g} s: "
                    f"{problem or ', '.join(self.options.urls)}; rerun the same command when one does"
                )
            else:
                time.sleep(0.05)

    def _ask(self, station: Station, policy: Policy, ask: Callable[[Any, str], list[Drawn]]) -> list[Drawn]:
        """Ask an engine. Raises EngineDownError also where it was restarted, and has lost the policy."""
        try:
            return ask(station.engine, self._model(station, policy))
        except RunError as error:
            if self.options.weights == "adapter" and policy.name not in station.engine.models():
                raise EngineDownError(f"{station.url}: was restarted ({error})") from error
            raise

    def _choose(self) -> Station | None:
        """Return the engine that answers with the fewest requests; None if none is to be tried now."""
        with self._choosing:
            now = time.monotonic()
            up = [station for station in self.stations if station.retry_at <= now]
            return min(up, key=lambda station: station.active, default=None)

    def _load(self, station: Station, policy: Policy) -> None:
        """Have an engine load a policy, and compare its log-probabilities of the probe with the trainer's."""
        began = time.monotonic()
        if self.options.weights == "adapter":
            station.engine.load_adapter(policy.name, str(policy.path))
        else:
            station.engine.load_weights(str(policy.path), policy.name)
        held, model = np.load(policy.path / PROBE_FILE), self._model(station, policy)
        theirs = np.array([station.engine.logps(model, ids.tolist()) for ids in held["ids"]])
        difference = float(np.abs(theirs - held["logps"]).max())
        (drawn,) = station.engine.complete(
            model, held["ids"][0].tolist(), 1, 0, Wanted(self.wanted.temperature, 1)
        )
        require_logps(drawn, station.url, self.inputs.definition.vocab_size)
        own = log_softmax(held["last"] / (self.wanted.temperature or 1.0))[drawn.ids[0]]
        if difference <= self.options.probe_tolerance < abs(own - drawn.logps[0]):
            raise RunError(
                f"sampler: {station.url} returns log-probabilities that are not those at the request's temperature, "
                f"{self.wanted.temperature:g}: {drawn.logps[0]:.4g} for one that is {own:.4g}; start vLLM with "
                "--logprobs-mode processed_logprobs"
            )
        station.shown[policy.name] = difference, time.monotonic() - began
        if not difference <= self.options.probe_tolerance:
            raise RunError(
                f"sampler: {station.url} does not hold the policy of update {policy.version}: its log-probabilities of "
                f"a probe are up to {difference:.3g} nats off, and sampler.probe_tolerance is "
                f"{self.options.probe_tolerance:g}; {CAUSES}"
            )

    def _model(self, station: Station, policy: Policy) -> str:
        """Return the name that requests give."""
        if self.options.weights == "adapter":
            return policy.name
        if self.options.model is not None:
            return self.options.model
        if station.url not in self._names:
            names = [name for name, each in station.engine.models().items() if each.parent is None]
            if len(names) != 1:
                raise RunError(f"sampler.model: {station.url} serves {', '.join(names)}; name one")
            self._names[station.url] = names[0]
        return self._names[station.url]

    def _policy(self, version: int) -> Policy:
        return Policy(f"{PREFIX}{self._tag}-v{version}", self.directory / f"policy-v{version}", version)

    def _claim(self) -> None:
        """Make the directory this run's. Raises InputError where it is another run's."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            owner, file = str(self.inputs.directory), self.directory / OWNER_FILE
            if not file.is_file():
                file.write_text(json.dumps({"stage": owner}))
            other = json.loads(file.read_text())["stage"]
        except OSError as error:
            raise RunError(f"sampler.directory: {self.directory}: {error.strerror or error}") from error
        if other != owner:
            raise InputError(f"sampler.directory: {self.directory} has the policies of {other}; give another")
