"""The samplers `vllm`, `sglang` and `rlhf`: rollouts from engines that the trainer publishes its policy to."""

from __future__ import annotations

import hashlib
import json
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
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
from rlhf_remote.engines import (
    KINDS,
    Drawn,
    EngineDownError,
    Needs,
    Wanted,
    lora_rank,
    problems,
    require_logps,
)
from rlhf_remote.service import address_problem

T = TypeVar("T")
PROBE = (2, 24)
"""Sequences and ids of the probe that every engine scores after every publication."""
FIRST_WAIT, LONGEST_WAIT = 1.0, 30.0
"""Seconds before an engine that failed is tried again, doubled each time up to the second number."""
ASK_SECONDS = 60.0
"""For an engine's answer in a check; the first one may compile."""
SAME_LOGPS = 1e-6
SHOWN_TOKENS = 4
"""Drawn after the probe at the run's temperature."""
PROCESSED = (
    "start vLLM with --logprobs-mode processed_logprobs, SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"
)
PROBE_FILE = "probe.npz"
OWNER_FILE = "owner.json"
SAME = 1e-5
"""How far a policy's log-probabilities of the probe may be from those that were written with it, in nats."""
POLL_SECONDS = 0.02
"""Between two looks at requests while environments answer."""
PREFIX = "policy-"
"""Begins the name of every policy that a run publishes."""
CAUSES = (
    "the usual causes: it holds older weights, an adapter was not loaded, another dtype or model; vLLM on CPUs keeps "
    "the first head of models with tied embeddings, see docs/how-to/engines.md"
)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Normalise logits along the last axis, float64."""
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def _dtype(definition: Any) -> str | None:
    """Name the dtype that the trainer computes in; None: a model of a plugin does not say."""
    dtype = getattr(definition, "compute_dtype", None)
    return None if dtype is None else np.dtype(dtype).name


def seed_of(key: Any, *numbers: int) -> int:
    """Derive the seed of a request from a rollout's key and the numbers of its completion and turn."""
    words = np.asarray(jax.random.key_data(key)).reshape(-1).tolist()
    return int(np.random.SeedSequence([*words, *numbers]).generate_state(1)[0] >> 1)


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

    def check(self, model: Any, options: Any, longest: int) -> Forecast:
        """Ask the engines what they serve. Raises InputError for wrong engines, and settings that none can follow.

        options: the stage's `RolloutOptions`. longest: tokens of the longest prompt with its completion or episode.
        """
        self._require(model.definition, options.sampling)
        wrong: list[str] = []
        warnings: list[str] = []
        needs = self.needs(model.definition, longest)
        start = f"start it: {self.command(model, longest, options.ahead)}"
        for url in self.urls:
            engine = KINDS[self.engine](url, self.api_key, ASK_SECONDS)
            try:
                found = problems(engine, needs)
                if not found and options.sampling.temperature != 1.0:
                    found = self._temperature(engine, needs)
                wrong += [f"urls: {line}; {start}" for line in found]
                adapters = engine.facts().adapters if not found else None
            except EngineDownError as error:
                warnings.append(f"sampler.urls: {error}; {start}")
                continue
            if self.weights == "adapter" and adapters is not None and adapters < options.ahead + 1:
                warnings.append(
                    f"sampler.urls: {url} computes {adapters} adapters at a time, and {options.ahead + 1} policies may "
                    f"sample: the others wait; --max-loras {options.ahead + 2}"
                )
        if wrong:
            raise InputError(*wrong)
        if self.weights == "disk" and options.ahead >= len(self.urls) > 0 < options.ahead:
            warnings.append(
                f"rollouts_ahead={options.ahead}: an engine holds one policy at a time, and loads the next when it has "
                f"written what it was asked for; {options.ahead + 1} engines would not wait for each other"
            )
        where = self.directory or "the stage's directory"
        what = "adapters" if self.weights == "adapter" else "whole weights"
        line = f"sampled by {len(self.urls)} × {self.engine}, which read each policy ({what}) from {where}"
        return Forecast((line,), tuple(warnings))

    def _temperature(self, engine: Any, needs: Needs) -> list[str]:
        """Ask for a token at temperature 2: its log-probability must not be the one at temperature 1."""
        model, prompt = engine.base(self.model), [needs.largest]
        (drawn,) = engine.complete(model, prompt, 1, 0, Wanted(2.0, 1))
        if abs(engine.logps(model, [*prompt, *drawn.ids])[-1] - drawn.logps[0]) > SAME_LOGPS:
            return []
        return [f"{engine.url}: returns log-probabilities at temperature 1 whatever is asked: {PROCESSED}"]

    def needs(self, definition: Any, longest: int) -> Needs:
        """Collect what engines must have. longest: as for `check`."""
        size, lora = definition.vocab_size, definition.lora
        absent = {token for start, stop in definition.absent for token in range(start, stop)}
        largest = next(token for token in reversed(range(size)) if token not in absent)
        rank = None if lora is None else lora.rank
        tied = bool(getattr(getattr(definition, "config", None), "tied", False))
        return Needs(self.weights, self.model, largest, size, longest, rank, tied)

    def command(self, model: Any, longest: int, ahead: int) -> str:
        """Write the command that starts an engine for this stage."""
        source, lora = getattr(model, "source", None) or "MODEL", model.definition.lora
        url = httpx.URL(self.urls[0])
        port = url.port or 8000
        if self.engine == "rlhf":
            adapters = f" --adapters {self.directory or 'RUN'}" if lora else ""
            return f"rlhf serve {source} --port {port} --control{adapters}"
        if self.engine == "sglang":
            adapters = f" --enable-lora --max-lora-rank {lora.rank}" if lora else ""
            return (
                f"python -m sglang.launch_server --model-path {source} --port {port} --context-length {longest}"
                f" --enable-deterministic-inference{adapters}"
            )
        adapters = (
            f" --enable-lora --max-loras {ahead + 2} --max-lora-rank {lora_rank(lora.rank)}" if lora else ""
        )
        dtype = _dtype(model.definition)
        return (
            "VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve "
            f"{source} --port {port} --max-model-len {longest}{f' --dtype {dtype}' if dtype else ''} "
            f"--logprobs-mode processed_logprobs{adapters}"
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
        self.examined: Needs | None = None
        """What it was last found to meet; None since it failed. Another run of this process may need more."""
        self.active = self.chosen = self.failures = 0
        self.retry_at = 0.0

    def cost(self, policy: Policy, *, exclusive: bool) -> int:
        """Order engines by how soon they can begin a request for a policy."""
        held = policy.name in self.loaded
        return self.chosen + (not held) + (1000 if exclusive and not held and self.active else 0)

    @contextmanager
    def holding(
        self, policy: Policy, load: Callable[[], None], *, exclusive: bool, alone: bool
    ) -> Iterator[None]:
        """Keep a policy loaded inside the block, whose receipt `load` has checked.

        exclusive: the engine holds one policy at a time: wait until nothing runs with another one. alone: its receipt
        must not be computed beside other requests.
        """
        with self.changed:
            while (exclusive or alone) and self.active and policy.name not in self.loaded:
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
        """Leave the engine out for a while; requests that fail together count once."""
        with self.changed:
            self.loaded.clear()
            self.examined = None
            if (now := time.monotonic()) >= self.retry_at:
                self.failures += 1
                self.retry_at = now + min(FIRST_WAIT * 2 ** (self.failures - 1), LONGEST_WAIT)


class Threads:
    """Runs functions in threads, at most so many at a time.

    A stopped process does not wait for them, as it would for those of an executor, whose requests may take minutes.
    """

    def __init__(self, most: int) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._most, self._started = most, 0

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Have a thread call a function. Called by any thread: one more than needed may start."""
        future: Future[T] = Future()
        self._work.put((future, work))
        if self._started < self._most:
            self._started += 1
            threading.Thread(target=self._run, daemon=True).start()
        return future

    def _run(self) -> None:
        while True:
            future, work = self._work.get()
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)


_CHOOSING = threading.Lock()
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
        self._probes: dict[int, np.ndarray] = {}
        """What the trainer's policies think of the probe, by version."""
        self._threads = Threads(options.concurrency * len(self.stations))
        longest = inputs.max_prompt_length + (
            inputs.conversation_length or inputs.options.max_completion_length
        )
        self.needs = options.needs(inputs.definition, longest)
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
        self._claim()
        policy = self._policy(version)
        model = self.inputs.model.with_params(params)
        if self.options.weights == "disk" and self.options.engine != "rlhf":
            model = model.untied()
        logits = np.asarray(model.logits(self.probe, np.ones_like(self.probe)), np.float64)
        own = np.take_along_axis(log_softmax(logits[:, :-1]), self.probe[:, 1:, None], -1)[..., 0]
        # Of a run that was deleted and begun again, a policy of this version is another one.
        there = policy.path / PROBE_FILE
        if there.is_file() and np.allclose(np.load(there)["logps"], own, rtol=0, atol=SAME):
            return policy
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
        self._claim()
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
        asked = [
            self._threads.submit(
                partial(self._complete, params, prompt, n, seed_of(key, int(numbers[i * n])), self.wanted)
            )
            for i, prompt in enumerate(prompts)
        ]
        for request in futures.wait(asked, return_when=futures.FIRST_EXCEPTION).done:
            request.result()  # raises what any of them raised, while others may still look for an engine
        return self._rollouts([each for group in asked for each in group.result()])

    def converse(
        self, params: Policy, prompts: Sequence[np.ndarray], key: Any, ids: np.ndarray, world: Any
    ) -> None:
        """Sample the turns of conversations with `world`, each as soon as its own conversation is ready.

        A turn's random numbers go by the number of its conversation and its own. Arguments as of `SamplerFunction`.
        """
        contexts, turns = [np.asarray(prompt, np.int32) for prompt in prompts], [0] * len(prompts)
        asked: dict[Future[list[Drawn]], int] = {}
        answering = set[int]()

        def ask(number: int, limit: int) -> None:
            seed = seed_of(key, int(ids[number]), *([turns[number]] if turns[number] else []))
            wanted = replace(self.wanted, max_tokens=limit)
            asked[
                self._threads.submit(partial(self._complete, params, contexts[number], 1, seed, wanted))
            ] = number

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

    def _complete(self, policy: Policy, prompt: np.ndarray, n: int, seed: int, wanted: Wanted) -> list[Drawn]:
        ids = np.asarray(prompt).tolist()
        return self._anywhere(
            policy, wanted, lambda engine, model: engine.complete(model, ids, n, seed, wanted)
        )

    def _rollouts(self, drawn: Sequence[Drawn]) -> Rollouts:
        width = self.wanted.max_tokens
        tokens, logps = np.zeros((len(drawn), width), np.int32), np.zeros((len(drawn), width), np.float32)
        for row, each in enumerate(drawn):
            tokens[row, : len(each.ids)], logps[row, : len(each.ids)] = each.ids, each.logps
        lengths = np.array([len(each.ids) for each in drawn], np.int32)
        return Rollouts(tokens, lengths, logps, np.array([each.finished for each in drawn]))

    def _anywhere(
        self, policy: Policy, wanted: Wanted, ask: Callable[[Any, str], list[Drawn]]
    ) -> list[Drawn]:
        """Ask the engine with the least to do; where one does not answer, another."""
        since, problem = time.monotonic(), ""
        exclusive = self.options.weights == "disk"
        while True:
            with self._choose(policy, exclusive=exclusive) as station:
                if station is None and time.monotonic() - since > self.options.patience:
                    raise Stopped(
                        f"no engine has answered for {self.options.patience:g} s: "
                        f"{problem or ', '.join(self.options.urls)}; rerun the same command when one does"
                    )
                if station is not None:
                    try:
                        load = partial(self._load, station, policy)
                        # vLLM 0.32 breaks where it scores a prompt with an adapter beside completions of others.
                        alone = self.options.engine == "vllm"
                        with station.holding(policy, load, exclusive=exclusive, alone=alone):
                            drawn = self._ask(station, policy, ask)
                        for each in drawn:
                            require_logps(each, station.url, self.inputs.definition.vocab_size)
                            if len(each.ids) > wanted.max_tokens:
                                raise RunError(f"{station.url}: a completion is longer than it may be")
                        station.failures = 0
                        return drawn
                    except EngineDownError as error:
                        station.fail()
                        problem = str(error)
            if station is None:
                time.sleep(POLL_SECONDS)

    def _ask(self, station: Station, policy: Policy, ask: Callable[[Any, str], list[Drawn]]) -> list[Drawn]:
        """Ask an engine. Raises EngineDownError also where it was restarted, and has lost the policy."""
        if self.options.weights == "adapter":
            try:
                return ask(station.engine, policy.name)
            except RunError as error:
                if policy.name not in station.engine.models():
                    raise EngineDownError(f"{station.url}: was restarted ({error})") from error
                raise
        drawn = ask(station.engine, self._model(station, policy))
        names = {name for each in drawn for name in each.versions} or {station.engine.weights_name()}
        others = sorted(f"{name}" for name in names - {policy.name, None})
        if any(name.startswith(PREFIX) for name in others):
            raise RunError(
                f"{station.url}: its weights are now called '{others[-1]}', and this run loaded "
                f"'{policy.name}': give each run engines of its own, or publish adapters"
            )
        if others:
            raise EngineDownError(f"{station.url}: was restarted, its weights are called '{others[-1]}'")
        return drawn

    @contextmanager
    def _choose(self, policy: Policy, *, exclusive: bool) -> Iterator[Station | None]:
        """Pick the engine that can begin soonest, and count it busy in the block; None if none is to be tried now."""
        with _CHOOSING:
            now = time.monotonic()
            up = [station for station in self.stations if station.retry_at <= now]
            station = min(up, key=lambda each: each.cost(policy, exclusive=exclusive), default=None)
            if station is not None:
                station.chosen += 1
        try:
            yield station
        finally:
            with _CHOOSING:
                if station is not None:
                    station.chosen -= 1

    def _load(self, station: Station, policy: Policy) -> None:
        """Have an engine load a policy, and compare its log-probabilities of the probe with the trainer's."""
        began = time.monotonic()
        if station.examined != self.needs:
            if found := problems(station.engine, self.needs):
                raise RunError("sampler: " + "; ".join(found))
            station.examined = self.needs
        if self.options.weights == "adapter":
            station.engine.load_adapter(policy.name, str(policy.path))
        else:
            station.engine.load_weights(str(policy.path), policy.name)
        held, model = np.load(policy.path / PROBE_FILE), self._model(station, policy)
        theirs = np.array([station.engine.logps(model, ids.tolist()) for ids in held["ids"]])
        difference = float(np.abs(theirs - held["logps"]).max())
        self._probes[policy.version] = held["logps"]
        self._require_policy(station, policy, theirs)
        self._require_temperature(station, model, held)
        station.shown[policy.name] = difference, time.monotonic() - began

    def _require_temperature(self, station: Station, model: str, held: Any) -> None:
        """Raise RunError where tokens' log-probabilities are nearer to those at temperature 1 than to those asked."""
        prompt, temperature = held["ids"][0].tolist(), self.wanted.temperature
        drawn = station.engine.complete(model, prompt, SHOWN_TOKENS, 0, Wanted(temperature, 1))
        for each in drawn:
            require_logps(each, station.url, self.inputs.definition.vocab_size)
        ids, theirs = [each.ids[0] for each in drawn], np.array([each.logps[0] for each in drawn])
        asked, plain = (log_softmax(held["last"] / t)[ids] for t in (temperature or 1.0, 1.0))
        if np.abs(theirs - plain).sum() < np.abs(theirs - asked).sum() / 2:
            raise RunError(
                f"sampler: {station.url} returns log-probabilities that are not those at the request's temperature, "
                f"{temperature:g}: {theirs[0]:.4g} for one that is {asked[0]:.4g}; {PROCESSED}"
            )

    def _require_policy(self, station: Station, policy: Policy, theirs: np.ndarray) -> None:
        """Raise RunError where an engine's log-probabilities of the probe, float64 [2, 23], are not the policy's.

        They are another policy's where they are twice as near to that, which finds one that is out of date by less
        than `probe_tolerance`.
        """
        own = self._probes[policy.version]
        difference, apart = float(np.abs(theirs - own).max()), float(np.abs(theirs - own).mean())
        nearest = min(self._probes, key=lambda version: float(np.abs(theirs - self._probes[version]).mean()))
        stale = float(np.abs(theirs - self._probes[nearest]).mean()) < apart / 2
        if difference <= self.options.probe_tolerance and not stale:
            return
        dtype, trainer = station.engine.facts().dtype, _dtype(self.inputs.definition)
        if stale:
            what = (
                "the adapter was not loaded" if self.options.weights == "adapter" else "it kept its weights"
            )
            causes = f"they are those of update {nearest}: {what}"
        elif dtype is not None and trainer is not None and dtype != trainer:
            causes = f"it computes in {dtype}, and the trainer in {trainer}: start it with --dtype {trainer}"
        else:
            causes = CAUSES
        raise RunError(
            f"sampler: {station.url} does not hold the policy of update {policy.version}: its log-probabilities of "
            f"a probe are up to {difference:.3g} nats off, and sampler.probe_tolerance is "
            f"{self.options.probe_tolerance:g}; {causes}"
        )

    def _model(self, station: Station, policy: Policy) -> str:
        """Return the name that requests give."""
        if self.options.weights == "adapter":
            return policy.name
        if station.url not in self._names:
            self._names[station.url] = station.engine.base(self.options.model)
        return self._names[station.url]

    def _policy(self, version: int) -> Policy:
        return Policy(f"{PREFIX}{self._tag}-v{version}", self.directory / f"policy-v{version}", version)

    def _claim(self) -> None:
        """Make the directory this run's. Raises InputError where it is another run's.

        That of the stage itself, the default, is the stage's also where it was moved to.
        """
        owner, file = str(self.inputs.directory), self.directory / OWNER_FILE
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if self.options.directory is None:
                return
            if not file.is_file():
                file.write_text(json.dumps({"stage": owner}))
            other = json.loads(file.read_text())["stage"]
        except OSError as error:
            raise RunError(f"sampler.directory: {self.directory}: {error.strerror or error}") from error
        if other != owner:
            raise InputError(
                f"sampler.directory: {self.directory} has the policies of {other}; give another directory, or delete "
                f"{OWNER_FILE} in it if that run was moved to {owner}"
            )
