"""The samplers `vllm`, `sglang` and `rlhf`: what a stage says of its engines, and what a check asks them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import httpx
import jax
from pydantic import Field

from rlhf_core import InputError, RunError
from rlhf_core.config.durations import Seconds
from rlhf_core.contracts import Forecast
from rlhf_remote.engines import KINDS, EngineDownError, Needs, Wanted, dtype_of, lora_rank, problems
from rlhf_remote.sampling import DRAWS, PROCESSED, PublishingSampler
from rlhf_remote.service import address_problem

ASK_SECONDS = 60.0
"""For an engine's answer in a check; the first one may compile."""
SAME_LOGPS = 1e-6


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
    timeout: Annotated[Seconds, Field(gt=0)] = 600.0
    patience: Annotated[float, Field(ge=0)] = 300.0
    probe_tolerance: Annotated[float, Field(gt=0)] = 0.2
    concurrency: Annotated[int, Field(ge=1)] = 64
    api_key: str | None = field(default=None, repr=False)

    engine: ClassVar[str]
    outside: ClassVar[bool] = True
    """Nothing of it is in the memory of the trainer's devices."""
    draws: ClassVar[int] = DRAWS
    """Tokens that an engine draws from each policy, for the sampling test."""

    def __call__(self, inputs: Any) -> PublishingSampler:
        self._require(inputs.definition, inputs.options)
        return PublishingSampler(self, inputs)

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
                adapters = None if found else engine.facts().adapters
            except RunError as error:
                wrong.append(f"urls: {error}; {start}")
                continue
            except EngineDownError as error:
                warnings.append(f"sampler.urls: {error}; {start}")
                continue
            wrong += [f"urls: {line}; {start}" for line in found]
            if self.weights != "adapter" or adapters is None:
                continue
            if adapters < options.ahead + 1:
                warnings.append(
                    f"sampler.urls: {url} computes {adapters} adapters at a time, and {options.ahead + 1} policies may "
                    f"sample: the others wait; --max-loras {options.ahead + 2}"
                )
        if wrong:
            raise InputError(*wrong)
        if self.weights == "disk" and options.ahead >= len(self.urls):
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
        model = engine.base(self.model)
        prompt = [needs.largest]
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
        source = getattr(model, "source", None) or "MODEL"
        lora = model.definition.lora
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
        dtype = dtype_of(model.definition)
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
