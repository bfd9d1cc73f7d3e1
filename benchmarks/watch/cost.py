"""What a page that is open costs a run: CPU seconds of the run and of `rlhf watch`, in pairs with and without.

python benchmarks/watch/cost.py PIPELINE.toml [--pairs 3] [--updates 40]

Needs Chromium, whose own seconds are not counted. The stages of the pipeline are run into a temporary directory; the
page of the run is open from before it begins until it ends, and asks every two seconds.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
RLHF = str(Path(sys.executable).with_name("rlhf"))


def run(pipeline: Path, directory: Path, stages: list[str]) -> tuple[float, float]:
    """Run a pipeline; return its CPU seconds, its children's included, and its wall-clock seconds."""
    command = [RLHF, "run", str(pipeline), "--dir", str(directory), *stages]
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    if status:
        sys.exit(said.decode())
    return used.ru_utime + used.ru_stime, time.monotonic() - began


def seconds_of(pid: int) -> float:
    """Return the CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def watched(pipeline: Path, directory: Path, stages: list[str]) -> tuple[float, float, float]:
    """Run a pipeline with its page open; return its CPU seconds, the server's meanwhile, and the wall-clock seconds."""
    from tests.shared.chromium import Chromium

    server = subprocess.Popen(
        [RLHF, "watch", str(directory.parent), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert server.stdout is not None
        address = next(filter(None, (re.search(r"http://\S+", line) for line in server.stdout)))[0]
        with Chromium() as browser:
            browser.open(address)
            # The page follows the run as soon as there is one.
            browser.read(
                "const timer = setInterval(() => { const run = document.querySelector('.run a');"
                "if (run) { clearInterval(timer); location.hash = run.getAttribute('href'); } }, 500); 0"
            )
            before = seconds_of(server.pid)
            used, took = run(pipeline, directory, stages)
            if not browser.read("document.querySelectorAll('.plot .line').length"):
                sys.exit("the page shows no curve")
            return used, seconds_of(server.pid) - before, took
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pipeline", type=Path)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of rlhf run")
    options = parser.parse_args()
    changes = [word for each in options.set for word in ("--set", each)]
    print("pair  run alone  run watched  server  seconds  server of run", flush=True)
    alone, both, servers = [], [], []
    for pair in range(options.pairs):
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder).resolve()
            measures = {
                "alone": lambda place=place: run(options.pipeline, place / "a" / "run", changes),
                "watched": lambda place=place: watched(options.pipeline, place / "b" / "run", changes),
            }
            (place / "b").mkdir()
            order = ("alone", "watched") if pair % 2 == 0 else ("watched", "alone")
            found = {name: measures[name]() for name in order}
        (without, _), (with_page, server, took) = found["alone"], found["watched"]
        alone.append(without)
        both.append(with_page)
        servers.append(server / with_page)
        print(
            f"{pair + 1:4} {without:10.1f} {with_page:12.1f} {server:7.2f} {took:8.0f} {server / with_page:14.2%}",
            flush=True,
        )
    ratios = [b / a - 1 for a, b in zip(alone, both, strict=True)]
    print(f"the run itself: {statistics.median(ratios):+.1%} ({min(ratios):+.1%} to {max(ratios):+.1%})")
    print(f"the server: {statistics.median(servers):.2%} of the run's CPU seconds")


if __name__ == "__main__":
    main()
