"""Clocks that are set in a run and between two of them, midnight in a rollout, and files from the future.

The clock of the day is shifted by the library of `shim.c`; a chat template writes the date, so that another day means
other tokens. No run may be refused for it, and each must end with the bits of one whose clock was right.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.torture import moments, runs, shim
from tests.torture.children import Child, rlhf
from tests.torture.experiment import Case, Trial

SHARE = 1.0
HOUR, DAY = 3600, 86400
BEGIN = 1_774_917_000
"""Half past midnight, 31 March 2026, UTC: when every run begins."""
SHIFTS = {
    "no change": 0,
    "over midnight": DAY - HOUR,
    "back an hour": -HOUR,
    "back a week": -7 * DAY,
    "a year ahead": 366 * DAY,
}
TEMPLATE = (
    "<bos>{% for part in '%d', '%m', '%y', '%H' %}"
    " {{ ('kite book lamp drum boat hat ball chair bell spoon rope stone'.split())[strftime_now(part)|int % 12] }}"
    "{% endfor %}{% for m in messages %}"
    "{% if m.role == 'assistant' %} : {{ m.content }} <eos>{% else %} {{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %} :{% endif %}"
)
TALKS = (
    runs.GRPO.replace("max_training_steps = 8", "max_training_steps = 4")
    .replace('"policy"', '"talk"')
    .replace(
        'rewards = ["data/rewards.py:right"]', 'environment = { name = "data/talk.py:Talk", max_turns = 2 }'
    )
)
STAGES = (
    runs.SFT
    + runs.SFT.replace('"base"', '"other"').replace("learning_rate = 1e-2", "learning_rate = 2e-2")
    + TALKS
).replace("[[stage]]\n", '[[stage]]\nchat_template = "data/dated.jinja"\n')
TALK = f"""
{moments.REACH}
from rlhf_core import Turn

class Talk:
    def reset(self, row, seed):
        self.turns = 0
        return row["prompt"]

    def step(self, completion):
        if os.environ["{moments.MAIN}"] == str(os.getpid()):  # not where it is tried before the run
            reach("rollout")
        self.turns += 1
        reward = len(completion["content"].split()) / 4
        return Turn([{{"role": "user", "content": "say kite"}}], reward, done=self.turns == 2)
"""
MOMENTS = (
    "load base",
    "update base 3",
    "load other",
    "update other 1",
    "load talk",
    "rollout",
    "update talk 2",
)
AGED = {"future": 400 * DAY, "past": -30 * 366 * DAY}


def run(trial: Trial) -> None:
    """Set clocks and times of files, and compare what becomes of the runs with an undisturbed one."""
    shim.require()
    scene = Path(tempfile.mkdtemp(prefix="torture-clocks-"))
    try:
        _prepare(scene)
        names = _names()
        trial.random("order").shuffle(names)
        trial.each(names, lambda case: _judge(case, scene), seconds=600)
    finally:
        shutil.rmtree(scene)


def _names() -> list[str]:
    shifts = list(SHIFTS)[1:]
    names = [f"in a run: {where}, {how}" for where in MOMENTS for how in shifts]
    names += [f"between two: {where}, {how}" for where in MOMENTS for how in shifts]
    names += [
        f"both: {first}, {how}; {then}, {later}"
        for i, first in enumerate(MOMENTS)
        for j, then in enumerate(MOMENTS[i + 1 :])
        for k, how in enumerate(shifts)
        for later in [list(SHIFTS)[(i + j + k) % len(SHIFTS)]]
    ]
    names += [f"files: {which} from the {age}" for which in ("data", "run", "both") for age in AGED]
    return [*names, "files: another content, size and time as before", "files: stages in another order"]


def _prepare(scene: Path) -> None:
    """Write the pipeline, and run it once with a clock that is right."""
    runs.write(scene, STAGES)
    moments.write(scene)
    data = scene / "data"
    (data / "dated.jinja").write_text(TEMPLATE)
    (data / "talk.py").write_text(TALK)
    for path in data.glob("*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(_as_messages(row)) + "\n" for row in rows))
    ended = _start(scene, "no change").wait(250)
    if ended.code:
        raise RuntimeError(f"the undisturbed run {ended}")
    (scene / "run").rename(scene / "expected")


def _as_messages(row: dict[str, Any]) -> dict[str, Any]:
    """Rewrite a row of texts as one of conversations; pairs are not used."""
    prompt = [{"role": "user", "content": row["prompt"].removesuffix(" :")}]
    if "completion" in row:
        return {"messages": [*prompt, {"role": "assistant", "content": row["completion"].strip()}]}
    return {**row, "prompt": prompt}


def _start(directory: Path, shift: str, *lines: str) -> Child:
    """Start the run with its clock set to the beginning plus a shift, and what it shall do at which moment."""
    clock = directory / "clock"
    clock.write_text(_clock(shift))
    env = {"TORTURE_CLOCK": str(clock), "TZ": "UTC", **moments.environment(directory / "mark", *lines)}
    return rlhf("run", "p.toml", "--plugin", moments.PLUGIN, cwd=directory, env=env)


def _clock(shift: str) -> str:
    return str(int(BEGIN - time.time() + SHIFTS[shift])).ljust(24)


def _judge(case: Case, scene: Path) -> None:
    """Judge one case in a copy of the scene."""
    shutil.copytree(
        scene, case.directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("expected", "mark*")
    )
    kind, _, rest = case.name.partition(": ")
    if kind == "files":
        if rest.startswith("another content"):
            _judge_hash(case)
        elif rest.startswith("stages"):
            _judge_order(case, scene)
        else:
            _judge_aged(case, *rest.split(" from the "))
            _compare(case, scene)
        return
    first, _, second = rest.partition("; ")
    where, how = first.split(", ")
    lines = [] if kind == "between two" else [f"{where}: clock {_clock(how)}".rstrip()]
    after = "no change" if kind == "in a run" else how
    if kind == "between two":
        lines.append(f"{where}: kill")
    elif kind == "both":
        then, after = second.split(", ")
        lines.append(f"{then}: kill")
    ended = _start(case.directory, "no change", *lines).wait(250)
    for line in lines:
        case.require(moments.reached(case.directory / "mark", line), f"{line} was never reached: {ended}")
    case.count("shifts", len(lines))
    if kind == "in a run":
        _require_done(case, ended)
    else:
        case.require(ended.code == -signal.SIGKILL, f"should have been killed: {ended}")
        _require_done(case, _start(case.directory, after).wait(250))
    _compare(case, scene)


def _require_done(case: Case, ended: Any) -> None:
    case.require(ended.code == 0, f"the run {ended}")
    for word in ("damaged", "belongs to another", "Traceback"):
        if word in ended.err:
            case.fail(f"{word!r} in {ended.err[-2000:]}")


def _compare(case: Case, scene: Path) -> None:
    for line in runs.differences(scene / "expected", case.directory / "run"):
        case.fail(line)


def _judge_aged(case: Case, which: str, age: str) -> None:
    """Kill a run, change the times of its files, and let it go on."""
    ended = _start(case.directory, "no change", "update talk 3: kill").wait(250)
    case.require(ended.code == -signal.SIGKILL, f"should have been killed: {ended}")
    roots = [case.directory / name for name in ("data", "run") if which in (name, "both")]
    for path in (path for root in roots for path in (root, *root.rglob("*"))):
        os.utime(path, (BEGIN + AGED[age],) * 2)
        case.count("files given another time")
    _require_done(case, _start(case.directory, "no change").wait(250))


def _judge_hash(case: Case) -> None:
    """Replace a file that is large enough for its hash to be cached, and give it back its size and time."""
    path = case.directory / "large.jsonl"
    hashes = []
    for byte in (b"a", b"b"):
        with open(path, "wb" if byte == b"a" else "r+b") as file:
            file.write(byte * (1 << 21))
        os.utime(path, (BEGIN, BEGIN))
        for _ in range(2):
            clock = {"RLHF_CACHE": str(case.directory / "cache"), "TORTURE_CLOCK": str(DAY)}
            ended = Child(_print_hash, path, cwd=case.directory, env=clock).wait(250)
            case.require(ended.code == 0, f"hashing {ended}")
            hashes.append(ended.out)
    case.require(hashes[0] == hashes[1] and hashes[2] == hashes[3], "the hash of one content changed")
    if hashes[0] == hashes[2]:
        case.fail("a file with another content has the hash of the one before it")


def _print_hash(path: Path) -> None:
    from rlhf_core.stage import identity

    print(identity.identify(path))


def _judge_order(case: Case, scene: Path) -> None:
    """Report a run whose stages have times in another order."""
    run = case.directory / "run"
    shutil.copytree(scene / "expected", run)
    for number, name in enumerate(("talk", "other", "base")):
        os.utime(run / name, (BEGIN + number,) * 2)
    ended = rlhf("report", "run", cwd=case.directory).wait(250)
    case.require(ended.code == 0, f"report {ended}")
    from tests.shared.report_runs import Report

    names = list(Report(run / "report.html").stages)
    if names != ["base", "other", "talk"]:
        case.fail(f"the report has the stages {names}, not in the order of the pipeline")
