"""What loading and saving hold: a process's own shards, and at most two of the largest parameter beside them.

Measured from outside, as the memory of a process that is no file's (`RssAnon`): the weights are read through a memory
map, whose pages the system drops when it needs them. Devices are the CPU's, so the shards count too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf_core.models import fresh_model
from tests.shared import processes as jobs

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc"),
]
SIDE, LAYERS = 512, 14
TABLE = {
    "model_type": "llama",
    "hidden_size": SIDE,
    "intermediate_size": SIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "vocab_size": 512,
}
LARGEST = 4 * LAYERS * SIDE * SIDE
"""Bytes, float32, of each of the seven stacked kernels; the rest is small."""
WHOLE = 7 * LARGEST + 2 * 4 * 512 * SIDE
SLACK = 8 * 2**20
"""Bytes of Python's own, and of thread stacks."""
PROGRAM = """
source, out = arguments
from rlhf_core.mesh import make_mesh
from rlhf_core.models import load_model
def wait(word):
    print(word, flush=True)
    sys.stdin.readline()
mesh = make_mesh(data=1, fsdp=-1)
load_model(source + "-small", mesh=mesh).save(out)  # what is made once: threads, programs
wait("ready")
model = load_model(source, mesh=mesh)
jax.block_until_ready(model.params)
wait("loaded")
model.save(out)
wait("saved")
"""


class Process:
    """The program above, run from one word it says to the next."""

    def __init__(self, log: Path, *arguments: object, devices: int) -> None:
        self.log = log
        # What is freed is the system's at once, as large arrays' memory is.
        environment = {name: value for name, value in os.environ.items() if name != jobs.DEVICES}
        environment |= {"MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": str(Path(__file__).parents[3])}
        index, count, port, *rest = arguments
        command = [sys.executable, "-c", jobs.JOIN + PROGRAM, index, count, devices, port, *rest]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                text=True,
            )
        self.status = Path(f"/proc/{self.process.pid}/status")

    def held(self) -> int:
        found = re.search(r"RssAnon:\s+(\d+) kB", self.status.read_text())
        return int(found[1]) * 1024 if found else 0

    def said(self, word: str) -> bool:
        text = self.log.read_text()
        assert self.process.poll() is None, text
        return word in text.split()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


def until(processes: list[Process], word: str) -> list[int]:
    """Let all go on until they say `word`; the most that each held on the way."""
    peaks, waiting, end = [0] * len(processes), set(range(len(processes))), time.monotonic() + 300
    while waiting:
        for i, process in enumerate(processes):
            peaks[i] = max(peaks[i], process.held())
            if i in waiting and process.said(word):
                waiting.remove(i)
        assert time.monotonic() < end
        time.sleep(0.001)
    return peaks


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("memory") / "model"
    fresh_model(TABLE).save(directory)
    fresh_model(TABLE | {"hidden_size": 16, "num_hidden_layers": 1}).save(f"{directory}-small")
    return directory


@pytest.mark.parametrize(
    ("count", "devices"),
    [pytest.param(1, 8, id="eight devices"), pytest.param(2, 1, id="two processes")],
)
def test_no_more_than_the_shards_and_two_parameters(
    source: Path, tmp_path: Path, count: int, devices: int
) -> None:
    port = jobs.free_port()
    processes = [
        Process(tmp_path / f"{i}.log", i, count, port, source, tmp_path / "out", devices=devices)
        for i in range(count)
    ]
    try:
        until(processes, "ready")
        before = [process.held() for process in processes]
        for process in processes:
            process.go()
        loading = [peak - start for peak, start in zip(until(processes, "loaded"), before, strict=True)]
        for process in processes:
            process.go()
        saving = [peak - start for peak, start in zip(until(processes, "saved"), before, strict=True)]
    finally:
        for process in processes:
            process.process.kill()
            process.process.wait()
    shards = WHOLE // count
    for peak in (*loading, *saving):
        assert 0.9 * shards < peak < shards + 2 * LARGEST + SLACK, (loading, saving)
    given = (source / "model.safetensors").read_bytes()
    assert len(given) == pytest.approx(WHOLE, rel=0.01)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == given
