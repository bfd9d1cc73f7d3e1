"""Sampling with engines: policies are published to them, proved to be held, and sampled from."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from rlhf_core import InputError, Rollouts, RunError
from rlhf_core.artifacts import write_atomic
from rlhf_core.errors import UNREADABLE, SequenceError, Stopped, library_words, read_limited, warn
from rlhf_core.logprobs import NEVER
from rlhf_core.sampling.stop_strings import token_bytes
from rlhf_core.workers.pool import at_stage_end
from rlhf_remote.engines import (
    KINDS,
    CompletionError,
    EngineDownError,
    SampledCompletion,
    Wanted,
    dtype_of,
    problems,
    require_count,
    require_end,
    require_logps,
)
from rlhf_remote.stations import PublishedPolicy, Station, Threads, choose

if TYPE_CHECKING:
    from rlhf_remote.sampler import EngineSampler

PROBE = (2, 24)
"""Sequences and ids of the probe that every engine scores after every publication."""
CONTEXTS = (6, 12, 18, 24)
"""Lengths of what engines draw tokens after for the sampling test, from the start of each of PROBE[0] sequences."""
DRAWS_EACH = 8
"""Tokens that are drawn after each of them."""
DRAWS = PROBE[0] * len(CONTEXTS) * DRAWS_EACH
SHOWN_TOKENS = 4
"""Drawn after the probe at the run's temperature."""
PROCESSED = (
    "start vLLM with --logprobs-mode processed_logprobs, SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"
)
PROBE_FILE = "probe.npz"
OWNER_FILE, RUN_FILE = "owner.json", "run.txt"
ROLLOUT_SHARE = 0.25
"""Share of `probe_tolerance` that the mean difference of a rollout's log-probabilities may have."""
SAME = 1e-5
"""How far a policy's log-probabilities of the probe may be from those that were written with it, in nats."""
POLL_SECONDS = 0.02
"""Between two looks at requests while environments answer."""
LEAVE_SECONDS = 10.0
"""How long the end of a run waits for engines to forget its adapters."""
PREFIX = "policy-"
"""Begins the name of every policy that a run publishes."""
CAUSES = (
    "the usual causes: it holds older weights, an adapter was not loaded, another dtype or model; vLLM on CPUs keeps "
    "the first head of models with tied embeddings, see docs/how-to/engines.md"
)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Normalise logits along the last axis, float64."""
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def drawn_moments(logits: np.ndarray, ids: np.ndarray, temperature: float) -> np.ndarray:
    """Compute `Moments` of tokens that are drawn from softmax(logits / temperature), float32 [contexts × draws, 3].

    logits: float32 [contexts, vocabulary]. ids: int [contexts, draws].
    """
    logps = log_softmax(logits.astype(np.float64) / temperature)
    entropies = -(np.exp(logps) * logps).sum(-1)
    variances = (np.exp(logps) * np.square(logps + entropies[:, None])).sum(-1)
    chosen = np.take_along_axis(logps, ids, -1)
    each = np.broadcast_arrays(chosen, entropies[:, None], variances[:, None])
    return np.stack(each, axis=-1).reshape(-1, 3).astype(np.float32)


def random_ids(definition: Any, seed: int) -> np.ndarray:
    """Draw ids of a policy's tokens, int64 of the shape PROBE."""
    ids = np.random.default_rng(seed).integers(0, definition.vocab_size, PROBE)
    for start, stop in definition.absent:
        ids[(ids >= start) & (ids < stop)] = 0
    return ids


def sample(
    engine: Any, model: str, ids: list[int], n: int, seed: int, wanted: Wanted, vocabulary: int
) -> list[SampledCompletion]:
    """Have an engine sample n completions of ids. Raises CompletionError where they cannot be that."""
    drawn: list[SampledCompletion] = engine.complete(model, ids, n, seed, wanted)
    require_count(engine.url, range(len(drawn)), n)
    for each in drawn:
        require_logps(each, engine.url, vocabulary)
    return drawn


def seed_of(key: Any, *numbers: int) -> int:
    """Derive the seed of a request from a rollout's key and the numbers of its completion and turn."""
    words = np.asarray(jax.random.key_data(key)).reshape(-1).tolist()
    return int(np.random.SeedSequence([*words, *numbers]).generate_state(1)[0] >> 1)


_STATIONS: dict[tuple[str, ...], list[Station]] = {}
"""Stations by engine, address and key: samplers of training, evaluation and previews share what engines hold."""


class PublishingSampler:
    """Publishes policies to engines and samples with them, from any number of threads."""

    def __init__(self, options: EngineSampler, inputs: Any) -> None:
        self.options, self.inputs = options, inputs
        self.directory = Path(options.directory or inputs.directory / "policies").absolute()
        kind = KINDS[options.engine]
        key = (options.engine, options.api_key or "", *options.urls)
        if key not in _STATIONS:
            _STATIONS[key] = [Station(kind(url, options.api_key, options.timeout)) for url in options.urls]
        self.stations = _STATIONS[key]
        self.engines = len(self.stations)
        self._closed = self._leaves = False
        self._names: dict[str, str] = {}
        self._probes: dict[int, np.ndarray] = {}
        """What the trainer's policies think of the probe, by version."""
        self._wrote: dict[int, set[str]] = {}
        """The addresses of the engines that sampled with each version of the policy."""
        self._drawn: dict[tuple[int, int], np.ndarray] = {}
        """What `draws` returns, by version and engine."""
        self._drawing = [threading.Lock() for _ in self.stations]
        self._off: int | None = None
        """The version that sampled the rollout before, where its log-probabilities were off."""
        self._warned = False
        self._texts: list[bytes] | None = None
        """The bytes of each token, once a stop string is looked for."""
        self._threads = Threads(options.concurrency * len(self.stations))
        longest = inputs.max_prompt_length + (
            inputs.conversation_length or inputs.options.max_completion_length
        )
        self.needs = options.needs(inputs.definition, longest)
        self.probe = random_ids(inputs.definition, 0)
        sampling = inputs.options
        self.wanted = Wanted(
            sampling.temperature,
            sampling.max_completion_length,
            tuple(dict.fromkeys((*inputs.stop_ids, *sampling.stop_token_ids))),
            tuple(sampling.stop_strings),
        )

    def publish(self, params: Any, version: int) -> PublishedPolicy:
        """Write a policy for the engines, with the trainer's own log-probabilities of the probe."""
        self._claim()
        policy = self._policy(version)
        model = self.inputs.model.with_params(params)
        if self.options.weights == "disk" and self.options.engine != "rlhf":
            model = model.untied()
        read = np.concatenate([self.probe, random_ids(self.inputs.definition, version + 1)])
        found = np.asarray(model.logits(read, np.ones_like(read)), np.float32)
        logits = found[: len(self.probe)].astype(np.float64)
        following = found[len(self.probe) :, np.array(CONTEXTS) - 1]
        own = np.take_along_axis(log_softmax(logits[:, :-1]), self.probe[:, 1:, None], -1)[..., 0]
        # Of a run that was deleted and begun again, a policy of this version is another one.
        there = policy.path / PROBE_FILE
        # One that is damaged is written again, with its policy.
        with suppress(RunError):
            if there.is_file() and np.allclose(_read_probe(there)["logps"], own, rtol=0, atol=SAME):
                return policy
        unfinished = policy.path.with_name(f".{policy.path.name}.tmp")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.rmtree(policy.path, ignore_errors=True)
        try:
            model.save(unfinished)
            probed = {"ids": self.probe, "logps": own, "last": logits[0, -1], "following": following}
            np.savez(unfinished / PROBE_FILE, **probed)
            unfinished.rename(policy.path)
        except OSError as error:
            raise RunError(f"sampler.directory: {self.directory}: {error.strerror or error}") from error
        return policy

    def receipt(self, policy: PublishedPolicy) -> dict[str, float]:
        """Return what engines showed for a policy: the largest difference of the probe, and seconds of the slowest."""
        shown = [each.shown[policy.name] for each in self.stations if policy.name in each.shown]
        differences, seconds = zip(*shown, strict=True)
        return {"sync/probe_difference": max(differences), "sync/seconds": max(seconds)}

    def draws(self, policy: PublishedPolicy) -> np.ndarray:
        """Return what engines drew before they sampled with a policy. See `SamplerFunction`."""
        drawn = [self._drawn.get((policy.version, place)) for place in range(self.engines)]
        return np.concatenate([np.zeros((0, 4), np.float32), *(each for each in drawn if each is not None)])

    def verdict(self, version: int, difference: float) -> str | None:
        """Warn where engines' log-probabilities of what they sampled are not the policy's; of two rollouts running,
        return why the run must stop. See `SamplerFunction`.

        The probe proves what an engine holds when it is asked, and this, what it writes completions with.
        """
        limit = self.options.probe_tolerance * ROLLOUT_SHARE
        before, self._off = self._off, None
        if difference <= limit:
            return None
        self._off = version
        urls = " and ".join(sorted(self._wrote.get(version, ()))) or " or ".join(self.options.urls)
        message = (
            f"{urls}: the log-probabilities of the completions for update {version + 1} are on average "
            f"{difference:.3g} nats off the trainer's, and {limit:.3g} are possible, a quarter of "
            "sampler.probe_tolerance. Those of the probe are right, so that it samples with other weights, or answers "
            "other prompts"
        )
        if before is not None:
            return (
                f"sampler: {message}. So were those for update {before + 1}: repair the engine; to undo what was "
                f"trained on them, delete the checkpoints after update {before} and the journal's rollouts since then"
            )
        if not self._warned:
            self._warned = True
            warn(f"sampler: {message}. The run ends if the next rollout is like this")
        return None

    def published(self, version: int) -> PublishedPolicy:
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
        for version in [each for each in list(self._wrote) if each < before]:
            del self._wrote[version]
        for drawn in [each for each in list(self._drawn) if each[0] < before]:
            del self._drawn[drawn]
        versions = sorted(int(path.name.rpartition("-v")[2]) for path in self.directory.glob("policy-v*"))
        for version in [each for each in versions if each < before][:-1]:
            policy = self._policy(version)
            for station in self.stations if self.options.weights == "adapter" else ():
                with station.changed:
                    held = policy.name in station.adapters
                    station.loaded.discard(policy.name)
                if held:
                    with suppress(
                        EngineDownError, RunError
                    ):  # it has forgotten it by itself, or will be loaded again
                        station.engine.unload_adapter(policy.name)
                        station.adapters.discard(policy.name)
            (policy.path / PROBE_FILE).unlink(missing_ok=True)  # without it, what a kill leaves is no policy
            shutil.rmtree(policy.path, ignore_errors=True)

    def __call__(
        self, params: PublishedPolicy, prompts: Sequence[np.ndarray], key: Any, ids: np.ndarray | None = None
    ) -> Rollouts:
        """Sample completions. params: what `publish` returned."""
        n = self.inputs.num_generations
        numbers = np.arange(len(prompts) * n) if ids is None else np.asarray(ids)
        asked = []
        for i, prompt in enumerate(prompts):
            seed = seed_of(key, int(numbers[i * n]))
            asked.append(
                self._threads.submit(partial(self._complete, params, i, prompt, n, seed, self.wanted))
            )
        for request in futures.wait(asked, return_when=futures.FIRST_EXCEPTION).done:
            request.result()  # raises what any of them raised, while others may still look for an engine
        return self._rollouts([each for group in asked for each in group.result()])

    def converse(
        self, params: PublishedPolicy, prompts: Sequence[np.ndarray], key: Any, ids: np.ndarray, world: Any
    ) -> None:
        """Sample the turns of conversations with `world`, each as soon as its own conversation is ready.

        A turn's random numbers go by the number of its conversation and its own. Arguments as of `SamplerFunction`.
        """
        contexts = [np.asarray(prompt, np.int32) for prompt in prompts]
        turns = [0] * len(prompts)
        asked: dict[Future[list[SampledCompletion]], int] = {}
        answering = set[int]()

        def ask(number: int, limit: int) -> None:
            seed = seed_of(key, int(ids[number]), *([turns[number]] if turns[number] else []))
            wanted = replace(self.wanted, max_tokens=limit)
            request = partial(self._complete, params, number, contexts[number], 1, seed, wanted)
            asked[self._threads.submit(request)] = number

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
                number = reply.conversation
                answering.remove(number)
                if reply.tokens is not None:
                    before = contexts[number][:0] if reply.replaces else contexts[number]
                    contexts[number] = np.concatenate([before, reply.tokens])
                    turns[number] += 1
                    ask(number, reply.limit)

    def _complete(
        self, policy: PublishedPolicy, number: int, prompt: np.ndarray, n: int, seed: int, wanted: Wanted
    ) -> list[SampledCompletion]:
        """Sample n completions of a prompt. number: its number in the call, for a message."""
        ids = np.asarray(prompt).tolist()

        def ask(engine: Any, model: str) -> list[SampledCompletion]:
            drawn = sample(engine, model, ids, n, seed, wanted, self.inputs.definition.vocab_size)
            for each in drawn:
                require_end(each, engine.url, wanted, self._has_stop_string)
            place = [station.engine for station in self.stations].index(engine)
            return [each._replace(engine=place) for each in drawn]

        try:
            return self._anywhere(policy, ask)
        except CompletionError as error:
            raise SequenceError(f"sampler '{self.options.engine}': {error}", number) from error

    def _draw(self, station: Station, policy: PublishedPolicy) -> None:
        """Have an engine draw tokens for the sampling test, unless it has, from a policy that it holds.

        They follow ids that are drawn anew for each policy: after these a policy stays uncertain that has learnt to be
        nearly certain of its own completions, and rounding does not have the same sign each time. The trainer knows all
        distributions in advance, so that it need not wait for the engine.
        """
        place = self.stations.index(station)
        definition = self.inputs.definition
        with self._drawing[place]:
            if (policy.version, place) in self._drawn:
                return
            contexts = [
                row[:length].tolist()
                for row in random_ids(definition, policy.version + 1)
                for length in CONTEXTS
            ]
            logits = _read_probe(policy.path / PROBE_FILE)["following"].reshape(len(contexts), -1)
            seeds = np.random.SeedSequence([policy.version, place]).generate_state(len(contexts)) >> 1
            wanted = replace(self.wanted, max_tokens=1, stop_ids=(), stop=())

            def ask(engine: Any, model: str) -> list[SampledCompletion]:
                asked = zip(contexts, seeds.tolist(), strict=True)
                return [
                    each
                    for ids, seed in asked
                    for each in sample(engine, model, ids, DRAWS_EACH, seed, wanted, definition.vocab_size)
                ]

            ids = np.array([each.ids[0] for each in self._ask(station, policy, ask)])
            for start, stop in definition.absent:
                logits[:, start:stop] = NEVER
            moments = drawn_moments(logits, ids.reshape(len(contexts), -1), wanted.temperature)
            self._drawn[policy.version, place] = np.insert(moments, 0, place, axis=1)

    def _has_stop_string(self, ids: Sequence[int]) -> bool:
        """Tell whether the text of these ids has a stop string."""
        if self._texts is None:
            self._texts = token_bytes(self.inputs.tokenizer)
        text = b"".join(self._texts[i] for i in ids if i < len(self._texts))
        return any(stop.encode() in text for stop in self.wanted.stop)

    def _rollouts(self, drawn: Sequence[SampledCompletion]) -> Rollouts:
        width = self.wanted.max_tokens
        tokens, logps = np.zeros((len(drawn), width), np.int32), np.zeros((len(drawn), width), np.float32)
        for row, each in enumerate(drawn):
            tokens[row, : len(each.ids)], logps[row, : len(each.ids)] = each.ids, each.logps
        lengths = np.array([len(each.ids) for each in drawn], np.int32)
        engine = np.array([each.engine for each in drawn], np.int16)
        return Rollouts(tokens, lengths, logps, np.array([each.finished for each in drawn]), engine=engine)

    def _anywhere(
        self, policy: PublishedPolicy, ask: Callable[[Any, str], list[SampledCompletion]]
    ) -> list[SampledCompletion]:
        """Ask the engine with the least to do; where one does not answer, another."""
        since = time.monotonic()
        problem = ""
        exclusive = self.options.weights == "disk"
        while True:
            if self._closed:
                raise Stopped("the run has ended")
            with choose(self.stations, policy, exclusive=exclusive) as station:
                if station is None and time.monotonic() - since > self.options.patience:
                    raise Stopped(
                        f"no engine has answered for {self.options.patience:g} s: "
                        f"{problem or ', '.join(self.options.urls)}; rerun the same command when one does"
                    )
                if station is not None:
                    try:
                        load = partial(self._load, station, policy)
                        # vLLM 0.32 breaks where it scores a prompt with an adapter next to completions of others.
                        alone = self.options.engine == "vllm"
                        with station.holding(policy, load, exclusive=exclusive, alone=alone):
                            if self.inputs.draws:
                                self._draw(station, policy)
                            drawn = self._ask(station, policy, ask)
                        station.failures = 0
                        self._wrote.setdefault(policy.version, set()).add(station.url)
                        return drawn
                    except EngineDownError as error:
                        station.fail()
                        problem = str(error)
            if station is None:
                time.sleep(POLL_SECONDS)

    def _ask(
        self, station: Station, policy: PublishedPolicy, ask: Callable[[Any, str], list[SampledCompletion]]
    ) -> list[SampledCompletion]:
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

    def _load(self, station: Station, policy: PublishedPolicy) -> None:
        """Have an engine load a policy, and compare its log-probabilities of the probe with the trainer's."""
        began = time.monotonic()
        if station.examined != self.needs:
            found = problems(station.engine, self.needs)
            if found:
                raise RunError("sampler: " + "; ".join(found))
            station.examined = self.needs
        if self.options.weights == "adapter":
            self._forget_killed(station)
            if not self._leaves:
                self._leaves = True
                at_stage_end(self.close)
            station.adapters.add(policy.name)
            station.engine.load_adapter(policy.name, str(policy.path))
        else:
            station.engine.load_weights(str(policy.path), policy.name)
        held = _read_probe(policy.path / PROBE_FILE)
        model = self._model(station, policy)
        theirs = np.array([station.engine.logps(model, ids.tolist()) for ids in held["ids"]])
        difference = float(np.abs(theirs - held["logps"]).max())
        self._probes[policy.version] = held["logps"]
        self._require_policy(station, policy, theirs)
        self._require_temperature(station, model, held)
        station.shown[policy.name] = difference, time.monotonic() - began

    def _forget_killed(self, station: Station) -> None:
        """Have an engine forget the adapters that this run left there when it was killed."""
        if self._prefix in station.cleaned:
            return
        for name in station.engine.models():
            if name.startswith(self._prefix) and name not in station.adapters:
                with suppress(RunError):
                    station.engine.unload_adapter(name)
        station.cleaned.add(self._prefix)

    def close(self) -> None:
        """Have engines forget this run's adapters, as far as they answer soon. Called when the stage has ended."""
        self._closed = True

        def leave(station: Station) -> None:
            with station.changed:
                names = {name for name in station.adapters if name.startswith(self._prefix)}
                station.adapters -= names
                station.loaded -= names
            for name in sorted(names):
                with suppress(EngineDownError, RunError):
                    station.engine.unload_adapter(name)

        threads = Threads(len(self.stations))
        futures.wait([threads.submit(partial(leave, each)) for each in self.stations], LEAVE_SECONDS)

    def _require_temperature(self, station: Station, model: str, held: Any) -> None:
        """Raise RunError where tokens' log-probabilities are nearer to those at temperature 1 than to those asked."""
        prompt = held["ids"][0].tolist()
        temperature = self.wanted.temperature
        wanted = Wanted(temperature, 1)
        words = self.inputs.definition.vocab_size
        drawn = sample(station.engine, model, prompt, SHOWN_TOKENS, 0, wanted, words)
        ids = [each.ids[0] for each in drawn]
        theirs = np.array([each.logps[0] for each in drawn])
        asked, plain = (log_softmax(held["last"] / t)[ids] for t in (temperature or 1.0, 1.0))
        if np.abs(theirs - plain).sum() < np.abs(theirs - asked).sum() / 2:
            raise RunError(
                f"sampler: {station.url} returns log-probabilities that are not those at the request's temperature, "
                f"{temperature:g}: {theirs[0]:.4g} for one that is {asked[0]:.4g}; {PROCESSED}"
            )

    def _require_policy(self, station: Station, policy: PublishedPolicy, theirs: np.ndarray) -> None:
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
        dtype = station.engine.facts().dtype
        trainer = dtype_of(self.inputs.definition)
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

    def _model(self, station: Station, policy: PublishedPolicy) -> str:
        """Return the name that requests give."""
        if self.options.weights == "adapter":
            return policy.name
        if station.url not in self._names:
            self._names[station.url] = station.engine.base(self.options.model)
        return self._names[station.url]

    @cached_property
    def _prefix(self) -> str:
        """How the names of this run's policies begin; runs elsewhere may have directories of the same name."""
        file = self.directory / RUN_FILE
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if not file.is_file() or re.fullmatch(rb"[0-9a-f]{16}", file.read_bytes()) is None:
                write_atomic(file, secrets.token_hex(8))
            run = file.read_bytes() + str(self.inputs.directory).encode()
        except OSError as error:
            raise RunError(f"sampler.directory: {self.directory}: {error.strerror or error}") from error
        return f"{PREFIX}{hashlib.sha256(run).hexdigest()[:8]}-v"

    def _policy(self, version: int) -> PublishedPolicy:
        return PublishedPolicy(f"{self._prefix}{version}", self.directory / f"policy-v{version}", version)

    def _claim(self) -> None:
        """Make the directory this run's. Raises InputError where it is another run's.

        That of the stage itself, the default, is the stage's also where it was moved to.
        """
        owner = str(self.inputs.directory)
        file = self.directory / OWNER_FILE
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if self.options.directory is None:
                return
            if not file.is_file():
                write_atomic(file, json.dumps({"stage": owner}))
            other = json.loads(read_limited(file))["stage"]
        except OSError as error:
            raise RunError(f"sampler.directory: {self.directory}: {error.strerror or error}") from error
        except UNREADABLE as error:
            raise InputError(
                f"sampler.directory: {file} is damaged ({library_words(error)}): delete it if the directory is that "
                f"of {owner}, or give another directory"
            ) from error
        if other != owner:
            raise InputError(
                f"sampler.directory: {self.directory} has the policies of {other}; give another directory, or delete "
                f"{OWNER_FILE} in it if that run was moved to {owner}"
            )


def _read_probe(path: Path) -> dict[str, np.ndarray]:
    """Read the probe's ids [2, 24], log-probabilities [2, 23] and last logits, and the logits that follow CONTEXTS of
    the policy's own ids, [2, 4, vocabulary]. Raises RunError for a damaged file.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in ("ids", "logps", "last", "following")}
        if found["ids"].shape != PROBE or found["logps"].shape != (PROBE[0], PROBE[1] - 1):
            raise ValueError("its arrays have other shapes")
    except Exception as error:
        raise RunError(
            f"{path} is damaged ({library_words(error)}): delete {path.parent} and run again, to write it again"
        ) from error
    return found
