"""The parts of the benchmark, most valuable first: each yields rows, which `run.py` prints and writes as they come."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from programs import Bench, Decoding, Heads, Policy, Training, adapter_update, reward_update, text_update
from rlhf_topologies.chips import Topology
from rlhf_topologies.compile import compile_stage, program_facts
from rlhf_topologies.description import StagePrograms
from rlhf_topologies.verdicts import FORWARD, TRAINING, judge_stage

from rlhf_core import ATTENTION
from rlhf_core.checkpoint import Checkpoints
from rlhf_core.errors import InputError, error_line
from rlhf_core.models import load_model
from rlhf_core.models.attention import attend
from rlhf_core.state import TrainState, abstract_state

Row = dict[str, Any]
GOLDEN_TOLERANCE = 1e-3
"""Of logits computed in float32, as the files' README has it."""
TOLERANCES = {"qwen3_5": 2.5e-3}
"""For golden files that are themselves less accurate: a token of this one is 2.1e-3 from the float64 result."""


@dataclass(frozen=True)
class Context:
    """bench: what to run. topology: the device, or the one that a CPU stands for. golden: files with logits, or None.
    on_cpu: whether nothing is to be compared with the data sheet.
    """

    bench: Bench
    topology: Topology
    golden: Path | None
    on_cpu: bool

    @property
    def repeats(self) -> int:
        return self.bench.sizes.repeats


def seconds_of(call: Callable[[], Any], repeats: int) -> float:
    """Time a call; the median, after a call that is not timed."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - began)
    return float(np.median(times))


def peak_bytes() -> int | None:
    """Return the most that the device has held since the process began; None where it does not count."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def compiled(context: Context, *described: StagePrograms) -> list[Row]:
    """Compile programs beside each other; return, for each stage, what the compiler of this device says of them.

    The functions that run find them in the cache of compiled programs.
    """
    programs = [program for stage in described for program in stage.programs]
    lowered = [program.lower() for program in programs]
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda each: each.compile(), lowered))
    facts = {
        id(program): program_facts(each, context.topology)
        for program, each in zip(programs, done, strict=True)
    }

    def one(stage: StagePrograms) -> Row:
        collected = compile_stage(stage, lambda program: facts[id(program)])
        return judge_stage({**collected, "remat": "auto"}, context.topology, context.bench.mesh.shape)

    return [one(stage) for stage in described]


def share(context: Context, work: float, seconds: float, of: str) -> float | None:
    """Return the share of the data sheet's products per second ("flops") or memory bandwidth that work took."""
    if context.on_cpu:
        return None
    chip = context.topology.chip
    full = chip.flops["bf16"] if of == "flops" else chip.memory_bandwidth
    return work / seconds / full


def row(name: str, seconds: float, verdict: Row, **more: Any) -> Row:
    """verdict: from `compiled`."""
    return {
        "name": name,
        "seconds": seconds,
        "memory_analysis_bytes": max(program["peak"] for program in verdict["programs"]),
        "peak_bytes": peak_bytes(),
        "compiled": verdict,
        **more,
    }


def attention(context: Context) -> Iterator[Row]:
    """Time attention by every implementation, forward and forward with backward; compare it with dense float32."""
    bench = context.bench
    for length in bench.sizes.attention.lengths:
        exact: Any = None
        for kind in ("xla", "cudnn", "pallas"):
            name = f"{kind} {length}"
            if kind not in bench.registry.names(ATTENTION):
                yield {"name": name, "skipped": f"no attention '{kind}' is registered"}
                continue
            try:
                heads = Heads(bench, length, kind)
                inputs = heads.inputs()
                exact = _exact(heads, inputs) if exact is None else exact
                (verdict,) = compiled(context, heads.described())
                forward, both = jax.jit(heads.forward), jax.jit(heads.both)
                seconds = seconds_of(partial(both, *inputs), context.repeats)
                errors = [
                    _largest_error(_first_head(heads, index, x), y)
                    for index, (x, y) in enumerate(zip(both(*inputs), exact, strict=True))
                ]
                yield row(
                    name,
                    seconds,
                    verdict,
                    forward_seconds=seconds_of(partial(forward, *inputs), context.repeats),
                    tokens_per_second=np.prod(heads.layout()[0].shape).item() / seconds,
                    error=errors[0],
                    gradient_error=max(errors[1:]),
                )
            except Exception as error:
                yield {"name": name, "error": error_line(error)}


def _first_head(heads: Heads, index: int, x: Any) -> Any:
    """Take the first head of keys, with its queries, of what `Heads.both` returned at an index."""
    if index:
        return x[:, :1]
    sizes = heads.bench.sizes.attention
    return x[..., : sizes.groups * sizes.head_dim]


def _exact(heads: Heads, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Compute the first head of keys densely in float32."""
    sizes = heads.bench.sizes.attention
    *arrays, positions, until = inputs
    q, k, v = (x[:, :1].astype(jnp.float32) for x in arrays[:3])
    gradient = arrays[3][..., : sizes.groups * sizes.head_dim].astype(jnp.float32)

    def both(q: Any, k: Any, v: Any, gradient: Any) -> Any:
        mixed, back = jax.vjp(lambda *x: attend(*x, positions, until), q, k, v)
        return mixed, *back(gradient)

    with jax.default_matmul_precision("highest"):
        return jax.device_get(jax.jit(both)(q, k, v, gradient))


def _largest_error(x: Any, exact: np.ndarray) -> float:
    """Return the largest difference, as a share of the largest value."""
    return float(np.abs(np.asarray(x, np.float32) - exact).max() / np.abs(exact).max())


def golden(context: Context) -> Iterator[Row]:
    """Compare logits of tiny checkpoints, one of each family, with those that transformers computed on a CPU."""
    folders = [] if context.golden is None else sorted(context.golden.glob("*/golden.npz"))
    if not folders:
        yield {"name": "golden logits", "skipped": "no golden files; carry what --prepare collects"}
    for file in folders:
        try:
            expected = np.load(file)
            if "logits" not in expected:  # a test of loading
                continue
            ids, mask = expected["input_ids"], expected["attention_mask"]
            errors = {}
            for dtype in ("float32", "bfloat16"):
                model = load_model(file.parent, registry=context.bench.registry, dtype=dtype)
                with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
                    logits = np.asarray(model.logits(ids, mask))
                errors[dtype] = float(np.abs(logits - expected["logits"])[mask > 0].max())
            yield {
                "name": f"logits of {file.parent.name}",
                "error": errors["float32"],
                "bfloat16_error": errors["bfloat16"],
                "passed": errors["float32"] <= TOLERANCES.get(file.parent.name, GOLDEN_TOLERANCE),
            }
        except InputError as error:  # a family that is not supported
            yield {"name": f"logits of {file.parent.name}", "skipped": error_line(error)}
        except Exception as error:
            yield {"name": f"logits of {file.parent.name}", "error": error_line(error)}


def resume(context: Context) -> Iterator[Row]:
    """Save after two updates, restore, go on for two; compare every bit with four updates at once."""
    bench = context.bench
    name = next(iter(bench.sizes.models))

    def texts() -> tuple[TrainState, Callable[[TrainState, int], TrainState]]:
        model = bench.model(bench.sizes.models[name], "lm")
        training = text_update(bench, model, bench.sizes.sequences, bench.sizes.length)
        programs = training.programs()
        return training.state, lambda state, number: training.update(programs, state)

    def rollouts() -> tuple[TrainState, Callable[[TrainState, int], TrainState]]:
        policy = Policy(bench, name)
        programs = policy.training.programs()
        return policy.state, lambda state, n: policy.update(programs, state, policy.sample(state, n))

    for kind, make in (("sft", texts), ("grpo", rollouts)):
        try:
            began = time.perf_counter()
            state, update = make()
            shapes = abstract_state(state.trained())
            with tempfile.TemporaryDirectory(prefix="accelerator-") as directory:
                checkpoints = Checkpoints(directory, keep=1)
                for number in range(4):
                    if number == 2:
                        checkpoints.save(2, state.trained(), host={}, block=True)
                    state = update(state, number)
                restored = checkpoints.restore(shapes)
                checkpoints.close()
            assert restored is not None
            again = state.with_trained(restored.state)
            for number in (2, 3):
                again = update(again, number)
            pairs = list(zip(*(jax.tree.leaves(_plain(x)) for x in (state, again)), strict=True))
            differ = sum(np.asarray(x).tobytes() != np.asarray(y).tobytes() for x, y in pairs)
            yield {
                "name": f"resume of {kind}",
                "seconds": time.perf_counter() - began,
                "arrays": len(pairs),
                "differing_arrays": differ,
                "passed": differ == 0,
            }
        except Exception as error:
            yield {"name": f"resume of {kind}", "error": error_line(error)}


def _plain(state: TrainState) -> Any:
    """Leave out the typed key, which updates do not change."""
    return state.params, state.opt_state, state.step, state.guard


def _steps(training: Training) -> Callable[[Callable[..., TrainState]], Callable[[], Any]]:
    """Return a function that wraps an update as a call without arguments, which keeps the new state."""
    programs, held = training.programs(), [training.state]

    def make(update: Callable[[Any, TrainState], TrainState]) -> Callable[[], Any]:
        def step() -> Any:
            held.append(update(programs, held.pop()))
            return held[0].step

        return step

    return make


def _sampled_update(
    policy: Policy, samples: Callable[[TrainState], Any], programs: Any, state: TrainState
) -> TrainState:
    """Update a policy with the completions that `samples` returns for its state."""
    return policy.update(programs, state, samples(state))


def _update_row(context: Context, name: str, training: Training, passes: int) -> Row:
    """passes: products per parameter and token."""
    described = training.described()
    (verdict,) = compiled(context, described)
    seconds = seconds_of(_steps(training)(training.update), context.repeats)
    return row(
        name,
        seconds,
        verdict,
        tokens_per_second=training.tokens / seconds,
        mfu=share(context, passes * described.weights * training.tokens, seconds, "flops"),
    )


def updates(context: Context, name: str) -> Iterator[Row]:
    """Run W1 to W4 of one model."""
    try:
        yield _update_row(context, f"W1 {name}", reward_update(context.bench, name), TRAINING)
    except Exception as error:
        yield {"name": f"W1 {name}", "error": error_line(error)}
    policy = Policy(context.bench, name)
    described = policy.described_update()
    update, rollout = compiled(context, described, policy.described_rollout())
    steps, given = _steps(policy.training), policy.given_completions()
    # A forward pass of the reference, and the update's.
    trained = (FORWARD + TRAINING) * described.weights * policy.tokens
    sampled = FORWARD * described.weights * policy.sampled
    seconds = seconds_of(lambda: policy.sample(policy.state, 0), context.repeats)
    yield row(
        f"W3 {name}",
        seconds,
        rollout,
        tokens_per_second=policy.sampled / seconds,
        mfu=share(context, sampled, seconds, "flops"),
        bandwidth=share(context, policy.decoded_bytes, seconds, "memory"),
    )
    for work, samples, tokens, flops in (
        ("W2", lambda state: given, policy.tokens, trained),
        ("W4", lambda state: policy.sample(state, 1), policy.tokens, trained + sampled),
    ):
        step = steps(partial(_sampled_update, policy, samples))
        seconds = seconds_of(step, context.repeats)
        yield row(
            f"{work} {name}",
            seconds,
            update,
            tokens_per_second=tokens / seconds,
            mfu=share(context, flops, seconds, "flops"),
        )


def decode(context: Context) -> Iterator[Row]:
    """Decode with different numbers of slots."""
    bench, works = context.bench, []
    for slots in bench.sizes.slots:
        works.append(Decoding(bench, slots, works[0].model if works else None))
    verdicts = compiled(context, *(work.described() for work in works))
    for slots, work, verdict in zip(bench.sizes.slots, works, verdicts, strict=True):
        try:
            seconds = seconds_of(partial(work.sample, 0), context.repeats)
            yield row(
                f"decode {slots}",
                seconds,
                verdict,
                tokens_per_second=work.sampled / seconds,
                bandwidth=share(context, work.decoded_bytes, seconds, "memory"),
            )
        except Exception as error:
            yield {"name": f"decode {slots}", "error": error_line(error)}


def adapters(context: Context) -> Iterator[Row]:
    """Update the adapters of a model of 8B; its own weights have no gradient, hence two forward passes' products."""
    yield _update_row(context, "LoRA", adapter_update(context.bench), 2 * FORWARD)


def parts(models: Mapping[str, Any]) -> dict[str, tuple[int, Callable[[Context], Iterator[Row]]]]:
    """List the parts, most valuable first: {name: (seconds that it may take, function)}."""
    sizes: dict[str, Any] = {
        name: (100, lambda context, name=name: updates(context, name)) for name in models
    }
    largest = list(sizes)[-1]
    return {
        "golden": (40, golden),
        largest: (140, sizes.pop(largest)[1]),
        "attention": (80, attention),
        "decode": (140, decode),
        "resume": (60, resume),
        "lora": (80, adapters),
        **sizes,
    }
