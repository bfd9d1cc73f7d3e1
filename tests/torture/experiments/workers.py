"""Rewards that hang, die, leak, flood and lie in worker processes: every call ends in time, and nothing is left.

A case is a process that makes 25 rollouts, each scored by three functions: one that misbehaves, in a worker with a
timeout; one that behaves, in workers of its own; and one in the process itself. Other cases are whole GRPO runs.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.torture import hostile_rewards, runs
from tests.torture.children import Child, Ended, rlhf
from tests.torture.experiment import Case, Trial
from tests.torture.hostile_rewards import BEHAVIOURS, FAILS, HEAVY, LATER, WRONG

SHARE = 1.5
ROLLOUTS, CASES = 25, 40
TIMEOUT = 1.0
GRACE = 20.0
"""Seconds beyond its timeouts within which a call must end on a busy machine: three processes may have to start."""
GROWTH = 48 << 20
"""Bytes by which the calling process may grow after its first rollouts."""
PEAK = 400 << 20
"""Bytes above these first rollouts that it may need for a moment."""
MARK = "TORTURE_WORKERS"
LONG = "ü" * 40_000
"""A completion that fills the pipe to a worker."""
RUN_HOW = (
    "nothing",
    "sleeps",
    "ignores signals",
    "segfaults",
    "too few",
    "bombs",
    "floods stdout",
    "changes directory",
    "crashes soon",
)


def run(trial: Trial) -> None:
    each = [f"alone {how}" for how in BEHAVIOURS]
    whole = [f"run {how}" for how in RUN_HOW]
    mixes = [f"mix {i}" for i in range(CASES)]
    order = [*each, *whole]
    trial.random().shuffle(order)
    spread: list[str] = []
    while order or mixes:  # one of each mix among the others, so that a short run sees all sorts
        spread += mixes[:1] + order[:2]
        del mixes[:1], order[:2]
    trial.each(spread, judge, seconds=240)


def judge(case: Case) -> None:
    sort, _, how = case.name.partition(" ")
    mark = f"{os.getpid()}-{case.random.getrandbits(64):x}"
    temporary = case.directory / "tmp"
    temporary.mkdir()
    work = case.directory / "work"
    work.mkdir()
    environment = {MARK: mark, "TMPDIR": str(temporary)}
    if sort == "run":
        _judge_run(case, work, how, environment)
    else:
        _judge_calls(case, work, _behaviours(case, sort, how), environment)
    for pid, words in _marked(mark):
        case.fail(f"process {pid} is left: {words}")
        os.kill(pid, signal.SIGKILL)
    for path in temporary.rglob("*"):
        case.fail(f"a temporary file is left: {path.relative_to(temporary)}")


def _behaviours(case: Case, sort: str, how: str) -> list[str]:
    """List what the rollouts of a case do: a mix, or three of one sort between others that do nothing."""
    if sort == "alone":
        return ["nothing", how, "nothing", how, "nothing"]
    return [case.random.choice(sorted(BEHAVIOURS)) for _ in range(ROLLOUTS)]


def _marked(mark: str) -> Iterator[tuple[int, str]]:
    """List the living processes that a case has started, by a variable of their environment."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue


# Calls


def _judge_calls(case: Case, work: Path, how: list[str], environment: dict[str, str]) -> None:
    seed = case.random.getrandbits(32)
    child = Child(_make_calls, how, seed, work / "report.json", cwd=work, env=environment)
    ended = child.wait(220)
    case.require((work / "report.json").is_file(), f"the calling process {str(ended)[:3000]}")
    report = json.loads((work / "report.json").read_text())
    for what in report["failures"]:
        case.fail(what)
    case.require(ended.code == 0, f"the calling process {str(ended)[:3000]}")
    if left := [path.name for path in work.iterdir() if path.name != "report.json"]:
        case.fail(f"files are left: {left}")
    case.count("calls", len(how))
    case.count("seconds in calls", round(report["seconds"]))


def _make_calls(how: list[str], seed: int, report: Path) -> None:
    """Score rollouts in this process and write what went wrong."""
    import warnings

    from rlhf_core.plugins import load_file
    from rlhf_core.rollouts import Reward
    from rlhf_core.workers.pool import close as close_workers

    warnings.simplefilter("ignore")
    functions = load_file(Path(hostile_rewards.__file__))
    rewards = [
        Reward("judge", 1.0, functions.judge, timeout=TIMEOUT, on_error="skip"),
        Reward("workers", 1.0, functions.right, timeout=60.0, processes=2),
        Reward("here", 1.0, functions.right),
    ]
    failures: list[str] = []
    stream = np.random.default_rng(seed)
    seconds = 0.0
    _score(rewards, "nothing", stream, failures, doubtful=False)
    close_workers()
    before, descriptors, here = _status(), _descriptors(), os.getcwd()
    spoiled: set[int] = set()
    for place, name in enumerate(how):
        began = time.monotonic()
        pool = rewards[0].pool()
        doubtful = not spoiled.isdisjoint(pool.processes)
        try:
            _score(rewards, name, stream, failures, doubtful=doubtful)
        except BaseException as error:
            failures.append(f"call {place}, {name}: {type(error).__name__}: {str(error)[:500]}")
        took = time.monotonic() - began
        seconds += took
        spoiled.update(pool.processes if name in LATER else ())
        if took > 3 * TIMEOUT + GRACE:
            failures.append(f"call {place}, {name}, took {took:.1f} s with a timeout of {TIMEOUT} s")
    close_workers()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed and is retained for later is no growth
    after = _status()
    if after["VmRSS"] - before["VmRSS"] > GROWTH:
        failures.append(f"the process grew by {(after['VmRSS'] - before['VmRSS']) >> 20} MiB: {how}")
    if after["VmHWM"] - before["VmRSS"] > PEAK:
        failures.append(f"the process needed {(after['VmHWM'] - before['VmRSS']) >> 20} MiB more: {how}")
    if new := _descriptors() - descriptors:
        failures.append(f"descriptors are left: {sorted(new)}")
    if os.getcwd() != here:
        failures.append(f"the process is in {os.getcwd()}")
    children = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
    if any(children):
        failures.append(f"children are left, perhaps as zombies: {children}")
    report.write_text(json.dumps({"failures": failures, "seconds": seconds}))


def _score(
    rewards: list[Any], how: str, stream: np.random.Generator, failures: list[str], *, doubtful: bool
) -> None:
    """Score one rollout and compare with what its functions should give.

    doubtful: whether an earlier call has spoiled the worker, so that this one may fail, too.
    """
    from rlhf_core.contracts import RewardInputs
    from rlhf_core.errors import RunError
    from rlhf_core.rollouts import score

    completions = ["x" * int(stream.integers(0, 50)) for _ in range(6)]
    if stream.random() < 0.3:
        completions[int(stream.integers(6))] = LONG
    inputs = RewardInputs(
        ["a prompt"] * 3 + ["another"] * 3,
        completions,
        [[1, 2]] * 6,
        {"how": [how] * 6},
        [f"prompts.jsonl row {i}" for i in range(6)],
    )
    right = np.array([len(text) / 8 for text in completions])
    skipped = rewards[0].failures
    try:
        table = score(rewards, inputs)
    except RunError as error:
        if how not in WRONG or "reward 'judge' returned" not in str(error):
            failures.append(f"{how}: RunError: {str(error)[:500]}")
        if len(str(error)) > 2000:
            failures.append(f"{how}: a message of {len(str(error)):,} characters")
        return
    if not (np.array_equal(table[:, 1], right) and np.array_equal(table[:, 2], right)):
        failures.append(f"{how}: values of other functions are wrong: {table.tolist()}")
    failed = rewards[0].failures > skipped
    values = table[:, 0]
    expected = np.full(6, np.nan) if failed or how in ("none", "not a number") else right
    if not np.array_equal(values, expected, equal_nan=True):
        failures.append(f"{how}: {values.tolist()}, not {expected.tolist()}")
    if failed and how in HEAVY:
        return
    if not doubtful and (how in WRONG or (failed != (how in FAILS) and how not in LATER)):
        failures.append(f"{how}: the call {'was skipped' if failed else 'was not skipped'}")


def _status() -> dict[str, int]:
    """Read this process's memory in bytes, now and at most."""
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return {line[0][:-1]: int(line[1]) * 1024 for line in lines if line[0] in ("VmRSS:", "VmHWM:")}


def _descriptors() -> set[str]:
    """List this process's descriptors, each with what it refers to."""
    opened = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            opened.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except OSError:
            continue  # that of the listing itself
    return opened


# Whole runs


def _judge_run(case: Case, work: Path, how: str, environment: dict[str, str]) -> None:
    """Train with a reward that misbehaves in every call, left out by `on_error`, beside one that behaves."""
    model = runs.SFT.replace("max_training_steps = 4", "max_training_steps = 1").replace(
        "save_steps = 2\n", ""
    )
    policy = runs.GRPO.replace(
        'rewards = ["data/rewards.py:right"]',
        'rewards = [{ name = "data/hostile_rewards.py:judge", label = "judge", timeout = 2.0, on_error = "skip", '
        'check = false }, "data/rewards.py:right"]',
    ).replace("max_training_steps = 8", "max_training_steps = 4")
    path = runs.write(work, model, policy, seed=case.random.getrandbits(16))
    (work / "data" / "hostile_rewards.py").write_text(Path(hostile_rewards.__file__).read_text())
    for name in ("prompts", "prompts.heldout"):
        file = work / "data" / f"{name}.jsonl"
        rows = [json.loads(line) | {"how": how} for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = rlhf("run", path.name, cwd=work, env=environment).wait(300)
    _judge_end(case, work, how, ended)
    case.count("runs")


def _judge_end(case: Case, work: Path, how: str, ended: Ended) -> None:
    case.require(not ended.traceback or how == "starts threads", f"{how}: a traceback: {ended}")
    if how in WRONG:
        case.require(ended.code == 1 and "reward 'judge' returned" in ended.err, f"{how}: {ended}")
        return
    case.require(ended.code == 0, f"{how}: {ended}")
    rows = [json.loads(line) for line in (work / "run/policy/metrics.jsonl").read_text().splitlines()]
    learned = [row for row in rows if "loss" in row]
    case.require(len(learned) == 4, f"{how}: {len(learned)} updates are logged, not 4")
    for row in learned:
        if row.get("rewards/rewards.py:right/mean") is None:
            case.fail(f"{how}: update {row['step']} has no mean of the other reward: {row}")
