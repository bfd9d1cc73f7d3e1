"""Run programs in processes forked from this one, which has everything imported: `processes.start` asks for them.

A job is a line of JSON on standard input, answered with its process id; its end goes to the file `ended`.
"""

from __future__ import annotations

import json
import select
import sys
from pathlib import Path

import jax

from tests.torture.children import Child, import_everything


def run(program: str, arguments: list[str]) -> None:
    """Run a program as `python -c PROGRAM ARGUMENTS`."""
    sys.argv = ["-c", *arguments]
    exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})


def main() -> None:
    import_everything()
    jax.config.update("jax_num_cpu_devices", 1)
    children: dict[Path, Child] = {}
    while True:
        if select.select([sys.stdin], [], [], 0.02 if children else None)[0]:
            line = sys.stdin.readline()  # who asks waits for the answer, so that there is one line
            if not line:
                break
            job = json.loads(line)
            child = Child(run, job["program"], job["arguments"], cwd=Path(job["cwd"]), env=job["environment"])
            children[Path(job["ended"])] = child
            print(child.pid, flush=True)
        for path, child in list(children.items()):
            if not child.running():
                del children[path]
                unfinished = path.with_suffix(".part")
                unfinished.write_text(json.dumps([child.wait().code, *child.output()]))
                unfinished.rename(path)


if __name__ == "__main__":
    main()
