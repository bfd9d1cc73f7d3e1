"""The reward `math_verify`: mathematical equality, judged in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from rlhf_core.errors import InputError
from rlhf_core.rewards.text import said

CHILD = Path(__file__).with_name("math_child.py")


@dataclass(frozen=True)
class MathVerify:
    """1 where the completion's final expression is mathematically equal to the row's `answer`, else 0.

    Both are read by the package math-verify, LaTeX or plain; the answer needs no dollar signs. A row whose answer is
    null is not scored (None). For chat data the last message's content is read.

    seconds: how long one comparison may take; beyond it the completion is wrong. A power tower can keep sympy busy
    for ever, in code that no thread or signal handler interrupts: each call therefore compares in a child process.

    Raises InputError where the package is missing, and for an answer that cannot be read.
    """

    seconds: Annotated[float, Field(gt=0)] = 5.0

    def __post_init__(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise InputError(
                "reward 'math_verify' needs the package math-verify, which is not installed: "
                "pip install 'rlhf-core[math]'"
            )

    def __call__(self, completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
        with _Judge(self.seconds) as judge:
            return [
                None if expected is None else float(judge.right(said(completion), str(expected)))
                for completion, expected in zip(completions, answer, strict=True)
            ]


class _Judge:
    """A child process, started when first needed and again after it was ended by a comparison that took too long."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.child: subprocess.Popen[str] | None = None

    def __enter__(self) -> _Judge:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.communicate()

    def right(self, completion: str, answer: str) -> bool:
        if self.child is None:
            self.child = subprocess.Popen(
                [sys.executable, "-P", str(CHILD), str(self.seconds)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        try:
            print(json.dumps([completion, answer]), file=self.child.stdin, flush=True)
            verdict = self.child.stdout.readline().strip()
        except BrokenPipeError:
            verdict = ""
        if not verdict:
            return self._ended()
        if verdict == "unreadable":
            raise InputError(
                f"reward 'math_verify': the answer {answer[:60]!r} is not mathematics that can be read; leave it null "
                "where the reward does not apply"
            )
        return verdict == "right"

    def _ended(self) -> bool:
        """False where a signal ended the child: it took too long, or too much memory."""
        assert self.child is not None
        self.child.communicate()
        code, self.child = self.child.returncode, None
        if code >= 0:
            raise RuntimeError(f"the process that runs math-verify ended with code {code}")
        return False
