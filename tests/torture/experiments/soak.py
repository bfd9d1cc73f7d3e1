"""Train for thousands of updates with a checkpoint every ten: memory, descriptors, threads and disk do not grow.

Without a budget 5,000 updates of an SFT run and 1,000 of a GRPO run, else a tenth. The model and the metrics are the
same bits as those of a run that saves nothing until its end.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from statistics import median
from typing import Any

from tests.torture import runs
from tests.torture.children import rlhf
from tests.torture.experiment import Case, Trial

SHARE = 2.0
UPDATES = {"sft": 5000, "grpo": 1000}
LEAST_SECONDS = 600.0
"""With less time than this a run has a tenth of its updates."""
MEGABYTE = 2**20
ALLOWED_GROWTH = 16 * MEGABYTE
"""Of resident memory between the second quarter and the last: what allocators move, and what tensorstore keeps.

tensorstore 0.1.86 never frees the keys of a specification that it turns into JSON, which orbax asks for about twice
for each array of a checkpoint: 32 kB for each save of this model, 8 MB in half of the longest run.
"""
FEW = 2
"""Descriptors and threads that may still be opened after the first quarter of a run; a leak opens one for each save."""
MEASURE = """
import json, os
from pathlib import Path
from rlhf_core import hookimpl

def size(directory):
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())

@hookimpl(trylast=True)
def rlhf_step_end(stage, step):
    if step % 10 == 9:  # between two saves
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        try:
            disk = size(stage.dir / "checkpoints")
        except FileNotFoundError:  # one was being retired
            return
        row = {
            "resident": resident,
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "disk": disk,
        }
        with open(Path(stage.dir.parent.parent) / f"{stage.name}.measured", "a") as file:
            print(json.dumps(row), file=file)
"""


def run(trial: Trial) -> None:
    tenth = 10 if trial.seconds_left < LEAST_SECONDS else 1
    names = [f"{trainer} {updates // tenth}" for trainer, updates in UPDATES.items()]
    trial.each([trial.only] if trial.only else names, judge, seconds=3600)


def judge(case: Case) -> None:
    trainer, updates = case.name.split()
    saved, unsaved = (case.directory / name for name in ("saved", "unsaved"))
    stage = "base" if trainer == "sft" else "policy"
    if trainer == "grpo":
        runs.write(case.directory / "base", runs.SFT)
        start(case, case.directory / "base")
    for directory, every in ((saved, 10), (unsaved, int(updates) + 1)):
        if trainer == "grpo":
            shutil.copytree(case.directory / "base", directory)
        text = (runs.SFT if trainer == "sft" else runs.GRPO).replace("evaluation_steps = 4\n", "")
        lines = [line for line in text.splitlines() if not line.startswith(("max_training_steps", "save_"))]
        lines += [
            f"max_training_steps = {updates}",
            f"save_steps = {every}",
            "save_total_limit = 2",
            "num_train_epochs = 100000",
        ]
        stages = ["\n".join(lines) + "\n"] if trainer == "sft" else [runs.SFT, "\n".join(lines) + "\n"]
        runs.write(directory, *stages)
        (directory / "measure.py").write_text(MEASURE)
        start(case, directory)
    for line in runs.differences(unsaved / "run", saved / "run"):
        case.fail(f"saving changes the run: {line}")
    case.count("updates", int(updates))
    check_growth(case, [json.loads(line) for line in (saved / f"{stage}.measured").read_text().splitlines()])


def start(case: Case, directory: Path) -> None:
    plugin = ("--plugin", "measure.py") if (directory / "measure.py").exists() else ()
    ended = rlhf("run", "p.toml", *plugin, cwd=directory).wait(3000)
    case.require(ended.code == 0, f"{directory.name}: {ended}")


def check_growth(case: Case, rows: list[dict[str, Any]]) -> None:
    """Compare the run's second quarter and its last: medians of the memory, of the rest the least, between saves."""
    quarter = len(rows) // 4
    for name in rows[0]:
        typical = median if name == "resident" else min
        early = typical(row[name] for row in rows[quarter : 2 * quarter])
        late = typical(row[name] for row in rows[-quarter:])
        allowed = {"resident": ALLOWED_GROWTH, "disk": 0.4 * early}.get(name, FEW)
        if late - early > allowed:
            case.fail(f"{name} grew from {early:,} to {late:,} between the second quarter and the last")
        if name == "resident":
            case.count("bytes of growth", max(0, int(late - early)))
