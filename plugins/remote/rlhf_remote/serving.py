"""A model directory, served by `rlhf serve` in a process of its own for as long as it is talked to."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rlhf_core import InputError, RunError
from rlhf_remote.models import KEY

READY = re.compile(r"^serving .* on (http://\S+)$")
BAD_INPUT = 2
COMMAND = """
import ctypes, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 15)
from rlhf_core.cli import main
main()
"""
"""`rlhf`, in a process that gets SIGTERM (15) when its parent has ended, however that was (PR_SET_PDEATHSIG, 1); other
systems than Linux have no such signal."""
END_SECONDS = 10.0


def require_language_model(model: str) -> None:
    """Raise InputError for a model that does not write, before its weights are read."""
    from rlhf_core.models import local_directory, stored_head

    if stored_head(local_directory(model)) == "score":
        raise InputError(f"{model} is a reward model, which does not write: use it with rlhf score")


@contextmanager
def served(model: str, flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Serve a model on this machine inside the block, which is given the address and the key.

    flags: of `rlhf serve`. Raises InputError or RunError with what the server said, if it does not start.
    """
    key = secrets.token_hex(16)
    command = [sys.executable, "-c", COMMAND, "serve", "--port", "0", "--slots", "1"]
    command += ["--api-key-env", KEY, *flags, "--", model]
    server = subprocess.Popen(
        command,
        env={**os.environ, KEY: key},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # Ctrl-C is for the conversation.
        start_new_session=True,
    )
    # A proxy of the environment is not asked for this machine's own address.
    before = os.environ.get("no_proxy")
    direct = [before or os.environ.get("NO_PROXY"), "127.0.0.1"]
    os.environ["no_proxy"] = ",".join(filter(None, direct))
    try:
        address = _wait_until_ready(server)
        # What it says later would be written into the conversation; a pipe that nobody reads would stop it.
        threading.Thread(target=lambda: [*_lines(server)], daemon=True).start()
        yield address, key
    finally:
        if before is None:
            del os.environ["no_proxy"]
        else:
            os.environ["no_proxy"] = before
        server.terminate()
        try:
            server.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()


def _wait_until_ready(server: subprocess.Popen[str]) -> str:
    """Return the address once requests are answered. Prints warnings meanwhile."""
    said = []
    for line in _lines(server):
        ready = READY.match(line)
        if ready is not None:
            return ready[1]
        if line.startswith("warning: "):
            print(line, file=sys.stderr, flush=True)
        else:
            said.append(line)
    code = server.wait()
    message = "\n".join(said) or f"rlhf serve ended with code {code}"
    raise (InputError if code == BAD_INPUT else RunError)(message)


def _lines(server: subprocess.Popen[str]) -> Iterator[str]:
    assert server.stderr is not None
    return (line.rstrip("\n") for line in server.stderr)
