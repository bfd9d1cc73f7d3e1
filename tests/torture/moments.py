"""A plugin and a reward file that do something at a named moment of a run: wait there, raise, die, set the clock.

The environment says what, so that the code is the same in the run that is disturbed and in the one that goes on.
Moments: "plugins", "load STAGE", "update STAGE N", "artifact STAGE", "end STAGE"; in rewards "rollout" and
"evaluation".
"""

from __future__ import annotations

import time
from pathlib import Path

from tests.torture.children import Child

VARIABLE, MARK = "TORTURE_AT", "TORTURE_MARK"
MAIN = "TORTURE_MAIN"
"""Names the number of the process that runs the command, in what it starts too."""
PLUGIN, REWARDS = "moments.py", "data/rewards.py"

REACH = f'''
import os, signal, time

def reach(moment):
    mark = os.environ.get("{MARK}")
    for line in os.environ.get("{VARIABLE}", "").splitlines():
        where, _, what = line.partition(": ")
        action, _, argument = what.partition(" ")
        if where != moment or mark is None or os.path.exists(f"{{mark}} {{line}}"):
            continue
        open(f"{{mark}} {{line}}", "x").close()
        if action == "wait":
            until = time.monotonic() + float(argument)
            while time.monotonic() < until:
                time.sleep(0.02)
        elif action == "raise":
            raise OSError("raised by the experiment")
        elif action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "clock":
            with open(os.environ["TORTURE_CLOCK"], "r+") as file:
                file.write(argument.ljust(24))
'''
_HOOKS = f"""
from rlhf_core import hookimpl

os.environ["{MAIN}"] = str(os.getpid())
reach("plugins")

@hookimpl
def rlhf_stage_start(stage):
    reach(f"load {{stage.name}}")

@hookimpl
def rlhf_step_end(stage, step):
    reach(f"update {{stage.name}} {{step}}")

@hookimpl
def rlhf_artifact_saved(stage):
    reach(f"artifact {{stage.name}}")

@hookimpl
def rlhf_stage_end(stage):
    reach(f"end {{stage.name}}")
"""
_REWARD = """
import json
from pathlib import Path

HELD_OUT = {str(json.loads(line)["prompt"]) for line in Path(__file__).with_name("prompts.heldout.jsonl").open()}

def right(prompts, completions, word, count):
    reach("evaluation" if {str(prompt) for prompt in prompts} <= HELD_OUT else "rollout")
    return [_grade(_text(each), *row) for each, *row in zip(completions, word, count)]

def _text(completion):
    return completion if isinstance(completion, str) else completion[-1]["content"]

def _grade(text, word, count):
    said = text.split()
    return sum(each == word for each in said[:count]) / count - 0.1 * len(said)
"""


def write(directory: Path) -> None:
    """Write the plugin `moments.py` and, over that of the data, the reward file."""
    (directory / PLUGIN).write_text(REACH + _HOOKS)
    (directory / REWARDS).write_text(REACH + _REWARD)


def environment(mark: Path, *lines: str) -> dict[str, str | None]:
    """Return the variables that make a run do `lines`, each "MOMENT: ACTION", once; none to let it run.

    Actions: "wait SECONDS", "raise", "kill", "clock SECONDS". mark: a path in front of the files that say what was
    done.
    """
    return {VARIABLE: "\n".join(lines), MARK: str(mark)}


def reached(mark: Path, line: str) -> bool:
    """Check whether a run has begun to do this line."""
    return Path(f"{mark} {line}").exists()


def wait_until_reached(mark: Path, line: str, child: Child, seconds: float = 150.0) -> bool:
    """Wait until a run has come to this line; return False if it has ended before, or not come in time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if reached(mark, line):
            return True
        if not child.running():
            return reached(mark, line)
        time.sleep(0.01)
    return False
