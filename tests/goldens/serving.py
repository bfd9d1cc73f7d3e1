"""A server of the suite beside a golden pipeline."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.goldens.pipelines import SERVED

PATIENCE = 120.0


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextlib.contextmanager
def served(directory: Path, python: str, environment: dict[str, str]) -> Iterator[str]:
    """Train a model, serve it for a trainer, and yield the server's address."""
    (directory / "served.toml").write_text(SERVED)
    command = [python, "-m", "rlhf_core.cli"]
    subprocess.run(
        [*command, "run", "served.toml"], cwd=directory, env=environment, check=True, capture_output=True
    )
    (directory / "policies").mkdir()
    port = free_port()
    options = ["--control", "--adapters", str(directory / "policies"), "--port", str(port)]
    server = subprocess.Popen(
        [*command, "serve", "served/base/artifacts/model", *options],
        cwd=directory,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(url, server)
        yield url
    finally:
        server.kill()
        server.wait()


def _wait(url: str, server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
            if json.load(answer)["data"]:
                return
        time.sleep(0.2)
    raise AssertionError(f"rlhf serve did not answer within {PATIENCE:.0f} s, or ended with {server.poll()}")
