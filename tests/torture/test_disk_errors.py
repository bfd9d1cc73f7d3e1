"""What the experiment on disk errors calls a true message, and a right end of a command."""

from __future__ import annotations

import pytest

from tests.torture.children import Ended
from tests.torture.experiments.disk_errors import _wrong_end
from tests.torture.shim import Call

WRITE = Call("write", 0, "run/base/checkpoints/.4.tmp/state.orbax-checkpoint-tmp/state/d/#")
RECORD = Call("rename", 0, "run/base/stage.json")
TRUE = "the checkpoint of step 4 could not be written to /x/run/base/checkpoints/4: Input/output error. …"


@pytest.mark.parametrize(
    ("call", "how", "code", "lines", "wrong"),
    [
        (WRITE, "once", 1, ["[base] 1/4  loss 2", TRUE], None),
        (WRITE, "once", 1, ["warning: something else", TRUE], None),
        (WRITE, "once", 1, [], "0 messages"),
        (WRITE, "once", 1, [TRUE, TRUE], "2 messages"),
        (WRITE, "once", 1, [TRUE.replace("Input/output error", "Permission denied")], "does not name"),
        (WRITE, "once", 1, [TRUE.replace("checkpoints/4", "")], "does not name"),
        (WRITE, "on", 2, [TRUE], "a mistake in the input"),
        (WRITE, "on", 75, [TRUE], "exit code 75"),
        (WRITE, "on", 1, ["Traceback (most recent call last):", "…"], "a traceback"),
        (WRITE, "once", 0, [f"warning: {TRUE}"], None),
        (WRITE, "once", 0, [], "not said"),
        (WRITE, "once", 0, [TRUE], "a message, and exit code 0"),
        (WRITE, "short", 0, [], None),
        (WRITE, "short", 1, [TRUE], "a short write is no failure"),
        (RECORD, "once", 1, ["stage.json could not be written to run/base/stage.json: Input/output error. …"], None),
        (RECORD, "once", 1, [TRUE], "does not name"),
        (Call("create", 0, "new/.lock"), "once", 2, ["dir: new cannot be made (Input/output error); …"], None),
    ],
)  # fmt: skip
def test_what_a_command_that_failed_must_say(
    call: Call, how: str, code: int, lines: list[str], wrong: str | None
) -> None:
    ended = Ended(code, "", "\n".join(lines), 1.0)
    said = next(_wrong_end(ended, [call], how, "EIO", harmless=False), None)
    assert (said is None) == (wrong is None)
    assert wrong is None or wrong in str(said)
