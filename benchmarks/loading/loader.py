"""Load a directory each time a line comes, and print what it took.

    python benchmarks/loading/loader.py KIND DIRECTORY

KIND: "load_model"; or NumPy, which reads every tensor, casts it to float32 and transposes the matrices of linear
layers: "one pass", from a memory map straight into the transposed array; "three passes", one after the other.
"""

from __future__ import annotations

import json
import re
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
STATUS = Path("/proc/self/status")


def tensors(directory: Path) -> Iterator[tuple[Path, int, list[int], bool]]:
    """(file, offset, shape, whether it is transposed) of every tensor."""
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            turned = len(entry["shape"]) == 2 and "embed" not in name
            yield path, 8 + length + entry["data_offsets"][0], entry["shape"], turned


def one_pass(directory: Path) -> Any:
    out = []
    for path, offset, shape, turned in tensors(directory):
        tensor = np.memmap(path, BFLOAT16, "r", offset, tuple(shape))
        out.append(np.array(tensor.T if turned else tensor, np.float32, order="C"))
    return out


def three_passes(directory: Path) -> Any:
    out = []
    for path, offset, shape, turned in tensors(directory):
        read = np.fromfile(path, BFLOAT16, int(np.prod(shape)), offset=offset).reshape(shape)
        cast = read.astype(np.float32)
        out.append(np.ascontiguousarray(cast.T) if turned else cast)
    return out


def load_model(directory: Path) -> Any:
    import jax

    import rlhf_core

    return jax.block_until_ready(rlhf_core.load_model(directory, dtype="float32").params)


KINDS: dict[str, Callable[[Path], Any]] = {
    "load_model": load_model,
    "one pass": one_pass,
    "three passes": three_passes,
}


def held() -> int:
    """Bytes of this process that are no file's."""
    found = re.search(r"RssAnon:\s+(\d+) kB", STATUS.read_text()) if STATUS.exists() else None
    return int(found[1]) * 1024 if found else 0


def watched(load: Callable[[], Any]) -> int:
    """The most that was held beside what was held before, in bytes."""
    before, peak, done = held(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], held())

    watcher = threading.Thread(target=watch)
    watcher.start()
    load()
    done.set()
    watcher.join()
    return peak[0] - before


def main() -> None:
    kind, directory = KINDS[sys.argv[1]], Path(sys.argv[2])
    peak = 0
    for number, _ in enumerate(sys.stdin):
        if number == 0:  # imports, threads and the page cache, which are nobody's; then watched, not timed
            kind(directory)
            peak = watched(lambda: kind(directory))
        started, busy = time.perf_counter(), time.process_time()
        loaded = kind(directory)
        row = {
            "seconds": round(time.perf_counter() - started, 3),
            "cpu_seconds": round(time.process_time() - busy, 3),
            "peak_bytes": peak,
        }
        del loaded
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
