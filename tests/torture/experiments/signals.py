"""SIGTERM, SIGINT and SIGHUP, to the process and to its group, once and twice, in every phase of a run.

The exit code is as documented, no message is a traceback, every finished update is in a checkpoint, and the same
command ends with the bits of a run that no signal met.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.torture import moments, runs, shim
from tests.torture.children import Child, Ended, rlhf
from tests.torture.experiment import Case, Trial

SHARE = 1.0
NUMBERS = {"TERM": signal.SIGTERM, "INT": signal.SIGINT, "HUP": signal.SIGHUP}
SECOND_PRESS, SAME_PRESS = 0.6, 0.05
"""Seconds between two signals: two presses of Ctrl-C, and one that is passed on to the group that has it already."""
WAITING = "wait 2.5"
SLOW = runs.GRPO.replace("max_training_steps = 8", "max_training_steps = 4").replace(
    'rewards = ["data/rewards.py:right"]', 'rewards = [{ name = "data/rewards.py:right"OPTIONS }]'
)
STAGES = runs.SFT + SLOW.replace("OPTIONS", "")
IN_WORKERS = runs.SFT + SLOW.replace("OPTIONS", ", timeout = 60")
PAUSES = {
    "plugins": "plugins",
    "load": "load base",
    "update": "update base 1",
    "artifact": "artifact base",
    "record": "end base",
    "load a later stage": "load policy",
    "reward": "rollout",
    "reward in a worker": "rollout",
    "evaluation": "evaluation",
    "update of a policy": "update policy 2",
    "last artifact": "artifact policy",
    "last record": "end policy",
}
"""Phases in which a plugin or a reward waits for the signal."""
LINES = {
    "check": r"will train on",
    "compile": r"\[base\] compiling",
    "compile a later stage": r"\[policy\] compiling",
    "rollout": r"\[policy\] drawing",
}
"""Phases that begin with a line of the output."""
CALLS = {
    "save": r"\trun/base/checkpoints/",
    "save of a policy": r"\trun/policy/checkpoints/",
    "write of a model": r"\trun/base/artifacts/",
    "write of the last model": r"\trun/policy/artifacts/",
    "write of a record": r"\trun/base/\.?stage",
    "write of the last record": r"\trun/policy/\.?stage",
    "any file": r"\trun/",
}
"""Phases that begin with a call on a file, one of all that match."""
LATER = {
    "load a later stage",
    "reward",
    "reward in a worker",
    "evaluation",
    "update of a policy",
    "last artifact",
    "last record",
    "compile a later stage",
    "rollout",
    "save of a policy",
    "write of the last model",
    "write of the last record",
}
"""Phases of the second stage, before which the first one is done."""
ALWAYS_75 = {*PAUSES, *LINES} - {"last artifact", "last record"}


def run(trial: Trial) -> None:
    """Send signals to runs and compare what they leave, and become, with an undisturbed one."""
    shim.require()
    scene = Path(tempfile.mkdtemp(prefix="torture-signals-"))
    try:
        _prepare(scene)
        names = [
            f"{phase}, {name} to the {target} {times}"
            for phase in (*PAUSES, *LINES, *CALLS, "import", "command check")
            for name in NUMBERS
            for target in ("process", "group")
            for times in ("once", "twice", "as an echo")
        ]
        trial.random("order").shuffle(names)
        trial.each(names, lambda case: _judge(case, scene), seconds=600)
    finally:
        shutil.rmtree(scene)


def _prepare(scene: Path) -> None:
    """Write the pipelines, and run each once without a signal."""
    for name, stages in (("workers", IN_WORKERS), ("p", STAGES)):
        path = runs.write(scene, stages)
        path.rename(scene / f"{name}.toml")
    moments.write(scene)
    log = scene / "log"
    env = shim.environment(scene, log=log)
    running = [
        _start(scene, "workers", "--dir", "expected-workers"),
        rlhf(*_command("p", "--dir", "run"), cwd=scene, env=env),
    ]
    for each in running:
        ended = each.wait(240)
        if ended.code:
            raise RuntimeError(f"the undisturbed run {ended}")
    (scene / "run").rename(scene / "expected-p")


def _command(pipeline: str, *more: str) -> list[str]:
    return ["run", f"{pipeline}.toml", "--plugin", moments.PLUGIN, *more]


def _start(directory: Path, pipeline: str, *more: str) -> Child:
    return rlhf(*_command(pipeline, *more), cwd=directory)


def _judge(case: Case, scene: Path) -> None:
    """Judge one signal, or pair of signals, in a copy of the scene."""
    phase, _, how = case.name.rpartition(", ")
    name, target, times = re.fullmatch(r"(\w+) to the (\w+) (.*)", how).groups()  # type: ignore[union-attr]
    shutil.copytree(
        scene, case.directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("expected*", "log")
    )
    pipeline = "workers" if phase == "reward in a worker" else "p"
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell ignores it for what runs in the background
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup ignores this one
    if phase in LATER:
        shutil.copytree(scene / f"expected-{pipeline}" / "base", case.directory / "run" / "base")
    child, began = _disturb(case, scene, phase, pipeline)
    number, group = NUMBERS[name], target == "group"
    child.signal(number, group=group)
    if times != "once":
        time.sleep(SECOND_PRESS if times == "twice" else SAME_PRESS)
        child.signal(number, group=group)
    ended = child.wait(150)
    case.count("signals", 1 if times == "once" else 2)
    if phase == "command check":
        _judge_check(case, ended, number)
    else:
        _judge_end(case, ended, phase, number, times, began)
    again = _start(case.directory, pipeline).wait(300)
    case.require(again.code == 0, f"the same command {again}")
    for line in runs.differences(scene / f"expected-{pipeline}", case.directory / "run"):
        case.fail(line)


def _disturb(case: Case, scene: Path, phase: str, pipeline: str) -> tuple[Child, bool]:
    """Start a run and wait until it is in a phase; return it, and whether the command had begun by then."""
    mark, log = case.directory / "mark", case.directory.with_name(case.directory.name + ".log")
    if phase in ("import", "command check"):
        command = _command(pipeline) if phase == "import" else ["check", f"{pipeline}.toml"]
        child = Child(_become_command, command, cwd=case.directory)
        time.sleep(case.random.uniform(0.0, 4.0))
        return child, False
    if phase in PAUSES:
        line = f"{PAUSES[phase]}: {WAITING}"
        env = moments.environment(mark, line)
        child = rlhf(*_command(pipeline), cwd=case.directory, env=env)
        case.require(
            moments.wait_until_reached(mark, line, child), f"{line} was never reached: {child.output()}"
        )
        return child, True
    pattern = {**LINES, **CALLS}[phase]
    env = shim.environment(case.directory, log=log)
    calls = re.findall(f".*{pattern}.*", (scene / "log").read_text()) if phase in CALLS else [""]
    wanted = case.random.randrange(len(calls))
    child = rlhf(*_command(pipeline), cwd=case.directory, env=env)
    while child.running():
        text = "".join(child.output()) if phase in LINES else log.read_text() if log.exists() else ""
        if len(re.findall(pattern, text)) > wanted:
            break
        time.sleep(0.005)
    log.unlink(missing_ok=True)
    return child, True


def _become_command(arguments: list[str]) -> None:
    """Start the command anew in this process, imports included."""
    os.execv(sys.executable, [sys.executable, "-m", "rlhf_core.cli", *arguments])


def _judge_check(case: Case, ended: Ended, number: int) -> None:
    """`rlhf check` has nothing to save: a signal ends it."""
    if ended.code not in (0, -number, 128 + number):
        case.fail(f"rlhf check {ended}")
    if (case.directory / "run").exists():
        case.fail("rlhf check has written a run directory")


def _judge_end(case: Case, ended: Ended, phase: str, number: int, times: str, began: bool) -> None:
    """Compare the exit code and the message with what is documented, and the updates with the checkpoints."""
    done = _stages_done(case.directory / "run")
    if ended.err.startswith("hung"):
        case.fail(f"did not end: {ended}")
    if number == signal.SIGINT and times == "twice":
        codes = {75, 0, 130}
    elif phase in ALWAYS_75:
        codes = {75}
    else:
        codes = {75, 0}
    if not began and not (case.directory / "run").exists():  # it may not have reached its first line
        codes |= {-number, 128 + number}
    if ended.code not in codes:
        case.fail(f"exit code {ended.code}, not {sorted(codes)}: {ended}")
    if ended.code == 0 and done != {"base", "policy"}:
        case.fail(f"exit code 0, and done are {done}: {ended}")
    if ended.code == 75 and done == {"base", "policy"}:
        case.fail(f"exit code 75, and nothing is left to do: {ended}")
    early = not began and ended.code in (-number, 128 + number)
    if ended.traceback and not early:
        case.fail(f"a traceback: {ended}")
    if ended.code == 75:
        case.count("stops")
        _judge_updates(case)


def _stages_done(run: Path) -> set[str]:
    records = {path.parent.name: json.loads(path.read_text()) for path in run.glob("*/stage.json")}
    return {name for name, record in records.items() if record["state"] == "done"}


def _judge_updates(case: Case) -> None:
    """Require a checkpoint of the last update that a stage has logged; every update is logged."""
    for metrics in (case.directory / "run").glob("*/metrics.jsonl"):
        made = max((json.loads(line)["step"] for line in metrics.read_text().splitlines()), default=0)
        saved = [int(p.name) for p in metrics.parent.glob("checkpoints/*") if p.name.isdecimal()]
        if made > max(saved, default=0):
            case.fail(
                f"{metrics.parent.name} had made {made} updates, and has checkpoints of {sorted(saved)}"
            )
        case.count("updates that were kept", made)
