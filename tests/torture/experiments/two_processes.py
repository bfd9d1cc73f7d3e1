"""Two processes of one job, of which one is killed, stopped, fails, has no disk, differs, comes late or not at all.

The survivor ends within 30 seconds, both with the documented code, one of them says why, and the next start of both
ends with the bits of two that nothing disturbed.
"""

from __future__ import annotations

import errno
import re
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.torture import moments, runs, shim
from tests.torture.children import Child, Ended, _command
from tests.torture.experiment import Case, Trial

SHARE = 1.5
SURVIVES_SECONDS = 30.0
STOPPED_SECONDS = 60.0
SHORT_STOP_SECONDS = 4.0
JOIN_SECONDS = 6.0
STAGES = runs.SFT.replace(
    "train_data", 'eval_data = "data/corpus.jsonl"\nevaluation_steps = 3\ntrain_data'
) + (
    runs.GRPO.replace("max_training_steps = 8", "max_training_steps = 4").replace(
        "save_steps = 3", "save_steps = 2"
    )
)
MOMENTS = {
    "loading": "load base",
    "the first update": "update base 1",
    "a save": "update base 2",
    "an evaluation": "update base 3",
    "an artifact": "artifact base",
    "a later load": "load policy",
    "a rollout": "rollout",
    "an evaluation of a policy": "evaluation",
    "the last artifact": "artifact policy",
}
EVENTS = ("SIGKILL", "SIGTERM", "SIGSTOP", "a hook that raises")
DISKS = {"metrics": r"metrics\.jsonl$", "a checkpoint": r"/checkpoints/", "an artifact": r"/artifacts/"}
OTHERS = (
    "another setting",
    "other data",
    "another reward",
    "a plugin more",
    "another version",
    "another seed",
)
STARTS = ("late", "absent", "absent, and the other is stopped", "port taken")


def run(trial: Trial) -> None:
    """Disturb one of two processes, and judge what both of them do."""
    shim.require()
    scene = Path(tempfile.mkdtemp(prefix="torture-two-"))
    try:
        _prepare(scene)
        names = [
            f"{event} to {process} in {moment}"
            for event in EVENTS
            for process in (0, 1)
            for moment in MOMENTS
            # A reward is called on the first process alone, and an event hook does not raise in it.
            if event != EVENTS[3]
            or ("rollout" not in MOMENTS[moment] and "evaluation" not in MOMENTS[moment])
        ]
        names += [f"full disk on {p} at {what} {i}" for p in (0, 1) for what in DISKS for i in range(3)]
        names += [f"{other} on {process}" for other in OTHERS for process in (0, 1)]
        names += [f"start: {process} {how}" for how in STARTS for process in (0, 1)]
        trial.random("order").shuffle(names)
        stopped = STOPPED_SECONDS if trial.seconds_left > 3600 else SHORT_STOP_SECONDS
        trial.each(names, lambda case: _judge(case, scene, stopped), at_once=1, seconds=900)
    finally:
        shutil.rmtree(scene)


def _prepare(scene: Path) -> None:
    """Write the pipeline and what one of two may be given instead, and run it once in two processes."""
    runs.write(scene, STAGES)
    moments.write(scene)
    (scene / "more.py").write_text("")
    changed = scene / "changed"
    shutil.copytree(scene / "data", changed / "data")
    corpus = changed / "data" / "corpus.jsonl"
    corpus.write_text(corpus.read_text().replace("kite", "rope"))
    pipeline = (scene / "p.toml").read_text().replace('dir = "run"', 'dir = "../run"')
    (changed / "p.toml").write_text(pipeline)
    shutil.copy(scene / moments.PLUGIN, changed)
    other = (scene / "data" / "rewards.py").read_text().replace("0.1 * len", "0.2 * len")
    (scene / "data" / "other.py").write_text(other)
    ended = _finish(
        _start_both(scene, env=[shim.environment(scene, log=scene / f"log{i}") for i in range(2)])
    )
    if any(each.code for each in ended):
        raise RuntimeError(f"the undisturbed run {ended[0]}\n{ended[1]}")
    (scene / "run").rename(scene / "expected")


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _job(process: int, port: int) -> dict[str, str | None]:
    return {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": str(process),
        "RLHF_JOIN_SECONDS": "60",
    }


def _start(
    directory: Path,
    process: int,
    port: int,
    env: Mapping[str, str | None],
    more: Sequence[str] = (),
    *,
    pipeline: str = "p.toml",
    version: str | None = None,
) -> Child:
    arguments = ("run", pipeline, "--plugin", moments.PLUGIN, *more)
    return Child(_run_as, arguments, version, cwd=directory, env={**_job(process, port), **env})


def _run_as(arguments: tuple[str, ...], version: str | None) -> None:
    """Run the command, perhaps with numpy in another version, as the records see it."""
    from rlhf_core.stage import identity

    if version is not None:
        real = identity.version
        identity.version = lambda name: version if name == "numpy" else real(name)
    _command(arguments)


def _start_both(directory: Path, env: Sequence[Mapping[str, str | None]] = ({}, {})) -> list[Child]:
    port = _port()
    return [_start(directory, process, port, env[process]) for process in range(2)]


def _finish(running: Sequence[Child], seconds: float = 300.0) -> list[Ended]:
    until = time.monotonic() + seconds
    return [each.wait(max(0.1, until - time.monotonic())) for each in running]


def _judge(case: Case, scene: Path, stopped_seconds: float) -> None:
    """Judge one disturbance in a copy of the scene."""
    shutil.copytree(
        scene, case.directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("expected", "log?")
    )
    name = case.name
    if match := re.fullmatch(r"(.*) to (\d) in (.*)", name):
        _judge_event(case, scene, match[1], int(match[2]), MOMENTS[match[3]], stopped_seconds)
    elif match := re.fullmatch(r"full disk on (\d) at (.*) (\d)", name):
        if not _judge_disk(case, scene, int(match[1]), DISKS[match[2]]):
            return
    elif match := re.fullmatch(r"start: (\d) (.*)", name):
        _judge_start(case, int(match[1]), match[2])
    else:
        other, _, process = name.rpartition(" on ")
        _judge_other(case, other, int(process))
    ended = _finish(_start_both(case.directory))
    for process, each in enumerate(ended):
        case.require(
            each.code == 0, f"started again, process {process} {each}\nthe other {ended[1 - process]}"
        )
    for line in runs.differences(scene / "expected", case.directory / "run"):
        case.fail(line)


def _judge_event(
    case: Case, scene: Path, event: str, process: int, moment: str, stopped_seconds: float
) -> None:
    """Let something happen to one process at a moment that one of them has come to."""
    at = process if moment not in ("rollout", "evaluation") else 0
    if not moment.endswith(("base", "base 1", "base 2", "base 3")):
        shutil.copytree(scene / "expected" / "base", case.directory / "run" / "base")
    action = "raise" if event == EVENTS[3] else "wait 1"
    line, mark = f"{moment}: {action}", case.directory / "mark"
    env: list[Mapping[str, str | None]] = [{}, {}]
    env[at] = moments.environment(mark, line)
    running = _start_both(case.directory, env)
    case.require(moments.wait_until_reached(mark, line, running[at]), f"{line} was never reached")
    if event.startswith("SIG"):
        running[process].signal(getattr(signal, event))
    began = time.monotonic()
    if event == "SIGSTOP":
        time.sleep(stopped_seconds)
        running[process].signal(signal.SIGCONT)
        began = time.monotonic()
    if event == "SIGKILL":
        running[process].wait(1)
        ended = _finish(running, SURVIVES_SECONDS)
    else:
        ended = _finish(running, 200)
    survivor, victim = ended[1 - process], ended[process]
    last = moment == "artifact policy"
    if event == "SIGKILL":
        _require_code(case, survivor, {0, 1} if last else {1})
        if survivor.code:
            _require_once(case, ended, f"process {process} has disappeared")
    elif event == "SIGTERM":
        for each in ended:
            _require_code(case, each, {0, 75} if last else {75})
        if {each.code for each in ended} == {75}:
            case.count("stops")
        else:
            _require_once(case, ended, "stopped", at_most=True)
    elif event == "SIGSTOP":
        codes = [each.code for each in ended]
        if codes != [0, 0] and 1 not in codes:
            case.fail(f"stopped for {stopped_seconds:g} s: {ended[0]}\n{ended[1]}")
        case.count("goes on after a pause" if codes == [0, 0] else "ends after a pause")
    else:
        for each in ended:
            _require_code(case, each, {1})
        _require_once(case, [victim], "raised by the experiment")
        if time.monotonic() - began > SURVIVES_SECONDS:
            case.fail(f"the other one ended {time.monotonic() - began:.0f} s after a hook had raised")
    _require_messages(case, ended)


def _judge_disk(case: Case, scene: Path, process: int, pattern: str) -> bool:
    """Fill the disk for one process at one of its calls on files; return False if it makes no such call."""
    calls = [
        call
        for call in shim.calls(scene / f"log{process}")
        if call.path.startswith("run/") and re.search(pattern, call.path)
        if call.operation in ("write", "create", "mkdir", "fsync")
    ]
    if not calls:
        return False
    call = case.random.choice(calls)
    env: list[Mapping[str, str | None]] = [{}, {}]
    env[process] = shim.environment(case.directory, at=call, action="errors", error=errno.ENOSPC)
    ended = _finish(_start_both(case.directory, env), 300)
    case.count("full disks")
    if {each.code for each in ended} == {0}:  # what failed was no loss, such as the removal of an old file
        case.count("full disks that did no harm")
        return True
    for each in ended:
        if each.code != 1:
            case.fail(f"disk full at {call}: {ended[0]}\nand the other {ended[1]}")
            break
    if not re.search("no space left on the disk", ended[0].err + ended[1].err):
        case.fail(f"disk full at {call}, and no word of it: {ended[0]}\nand the other {ended[1]}")
    _require_messages(case, ended)
    return True


def _judge_other(case: Case, other: str, process: int) -> None:
    """Give one process something else; both must refuse it and name it."""
    port = _port()
    running = []
    for each in range(2):
        if each != process:
            running.append(_start(case.directory, each, port, {}))
            continue
        directory, more, version = case.directory, [], None
        if other == "another setting":
            more = ["--set", "base.learning_rate=3e-2"]
        elif other == "another seed":
            more = ["--set", "seed=5"]
        elif other == "other data":
            directory = case.directory / "changed"
        elif other == "another reward":
            more = ["--set", f"policy.rewards=['{case.directory / 'data' / 'other.py'}:right']"]
        elif other == "a plugin more":
            more = ["--plugin", "more.py"]
        elif other == "another version":
            version = "0.0.1"
        running.append(_start(directory, each, port, {}, more, version=version))
    ended = _finish(running, 200)
    if other == "a plugin more" and [each.code for each in ended] == [0, 0]:
        return
    for each in ended:
        _require_code(case, each, {2})
    _require_once(case, ended, "give all processes of a job the same")
    _require_messages(case, ended)
    if list((case.directory / "run").glob("*/checkpoints")):
        case.fail("something was trained by two processes that differ")


def _judge_start(case: Case, process: int, how: str) -> None:
    """Start one of the two late or never, or give its port away."""
    port = _port()
    if how == "late":
        first = _start(case.directory, 1 - process, port, {})
        time.sleep(case.random.uniform(2, 5))
        for each in _finish([first, _start(case.directory, process, port, {})]):
            _require_code(case, each, {0})
        return
    if how == "port taken":
        with socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True):
            running = [_start(case.directory, each, port, {}) for each in (process, 1 - process)]
            ended = _finish(running, 80)
        for each in ended:
            _require_code(case, each, {1})
        _require_once(case, ended, "cannot be opened")
        _require_messages(case, ended)
        return
    there = _start(case.directory, 1 - process, port, {"RLHF_JOIN_SECONDS": f"{JOIN_SECONDS:g}"})
    if how != "absent":
        time.sleep(JOIN_SECONDS / 2)
        there.signal(signal.SIGTERM)
    (ended,) = _finish([there], JOIN_SECONDS + 40)
    _require_code(case, ended, {1} if how == "absent" else {75})
    if how == "absent":
        _require_once(case, [ended], f"has waited {JOIN_SECONDS:g} s")
        if ended.seconds > JOIN_SECONDS + 20:
            case.fail(f"waited {ended.seconds:.0f} s instead of {JOIN_SECONDS:g}")
    _require_messages(case, [ended])
    if list((case.directory / "run").glob("*/stage.json")):
        case.fail("a stage began without the other process")


def _require_code(case: Case, ended: Ended, codes: set[int]) -> None:
    if ended.code not in codes:
        case.fail(f"exit code {ended.code}, not {sorted(codes)}: {ended}")


def _require_once(case: Case, ended: Sequence[Ended], words: str, *, at_most: bool = False) -> None:
    """Require that one process says this, once."""
    times = sum(each.err.count(words) for each in ended)
    if times > 1 or (times == 0 and not at_most):
        said = "\n".join(str(each) for each in ended)
        case.fail(f"{words!r} is said {times} times: {said}")


def _require_messages(case: Case, ended: Sequence[Ended]) -> None:
    for each in ended:
        if each.traceback:
            case.fail(f"a traceback: {each}")
        if each.err.startswith("hung"):
            case.fail(f"hung: {each}")
