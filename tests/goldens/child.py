"""The process of a golden pipeline: `python child.py OUT COMMAND…` runs `rlhf COMMAND` for each, one after another.

What each prints and its exit code are written to OUT as JSON. The process must be fresh, as a user's is.
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import signal
import sys
from pathlib import Path


def main() -> None:
    out, *commands = sys.argv[1:]
    ended = []
    for command in commands:
        handlers = {
            number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        printed, errors = io.StringIO(), io.StringIO()
        sys.argv = ["rlhf", *shlex.split(command)]
        code = 0
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            try:
                from rlhf_core.cli import main as rlhf

                rlhf()
            except SystemExit as error:
                code = int(error.code or 0)
        # A command that was stopped leaves handlers that ignore signals.
        for number, handler in handlers.items():
            signal.signal(number, handler)
        ended.append({"code": code, "out": printed.getvalue(), "err": errors.getvalue()})
    Path(out).write_text(json.dumps(ended))


if __name__ == "__main__":
    main()
