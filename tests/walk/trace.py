"""The child of a walk: runs one command of ours and writes which of our functions it enters.

    python trace.py ROOT OUT (all|warm) COMMAND...

all: from the start to the end. warm: one update, from the user's reward of the third rollout to that of the fourth.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

REWARD = "brevity"
ROLLOUT = 4
"""Completions of a rollout; the reward is called for fewer when it is tried before the run."""
FIRST = 3


class Walk:
    """The functions that were entered while it was on."""

    def __init__(self, root: str, part: str) -> None:
        self.places = (f"{root}/rlhf_core/", f"{root}/plugins/")
        self.part = part
        self.on = part == "all"
        self.rollouts = 0
        self.entered: dict[tuple[str, int, str], CodeType] = {}

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        """Note a call of ours; sys.setprofile calls it."""
        code = frame.f_code
        if self.part == "warm" and event == "return" and code.co_name == REWARD:
            self._rollout_scored(frame)
        is_function = code.co_flags & 1 and not code.co_name.startswith("<")
        if self.on and event == "call" and is_function and code.co_filename.startswith(self.places):
            self.entered.setdefault((code.co_filename, code.co_firstlineno, code.co_qualname), code)

    def _rollout_scored(self, frame: FrameType) -> None:
        if len(frame.f_locals["completions"]) == ROLLOUT:
            self.rollouts += 1
            self.on = self.rollouts == FIRST

    def lines(self, root: str) -> Counter[str]:
        """Return how many lines the entered functions have in each file."""
        found: Counter[str] = Counter()
        for (name, _, _), code in self.entered.items():
            last = max(line for _, _, line in code.co_lines() if line)
            found[name[len(root) + 1 :]] += last - code.co_firstlineno + 1
        return found


def main() -> None:
    root, out, part, *command = sys.argv[1:]
    walk = Walk(root, part)
    threading.setprofile(walk.profile)
    sys.setprofile(walk.profile)
    sys.argv = ["rlhf", *command]
    code: Any = 0
    try:
        from rlhf_core.cli import main as rlhf

        rlhf()
    except SystemExit as error:
        code = error.code or 0
    finally:
        sys.setprofile(None)
        lines = walk.lines(root)
        figures = {
            "exit": code,
            "files": len(lines),
            "functions": len(walk.entered),
            "lines": sum(lines.values()),
            "by_file": lines.most_common(),
        }
        Path(out).write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
