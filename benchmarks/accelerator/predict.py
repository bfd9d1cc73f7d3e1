"""Compile the works for devices that are not there, as `rlhf check --on` does, and write what to expect of them.

    python benchmarks/accelerator/predict.py h200:1 h100:1

The first names the devices that programs are compiled for. The others are judged by the same programs: an H100 and an
H200 have the same cores, and differ in memory. Writes predicted_CHIP.json beside this file after every program.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
START = """
import json, runpy, site, sys
for path in json.loads(sys.argv[1]):  # after this environment's own, whose jax and compiler come first
    site.addsitedir(path) if path.endswith("-packages") else sys.path.append(path)
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def start_in_compiler(script: str, name: str, arguments: list[str]) -> int:
    """Run a script again, in the environment that has the compiler for the devices of this name."""
    from rlhf_topologies import interpreters
    from rlhf_topologies.chips import parse

    python = interpreters.find(parse(name))
    paths = [
        path for path in map(os.path.abspath, sys.path) if Path(path).is_dir() and "lib/python" not in path
    ]
    paths += [path for path in sys.path if path.endswith("-packages")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [python, "-c", START, json.dumps(paths), script, "--here", *arguments],
        env={**environment, **interpreters.SETTINGS},
        check=False,
    ).returncode


def predict(
    names: list[str], only: str, *, devices: list[Any] | None = None, tiny: bool = False
) -> dict[str, Any]:
    """Compile the works whose names contain `only`; return {chip: what is written}. devices: for tests."""
    from programs import Bench, works
    from rlhf_topologies.chips import parse
    from rlhf_topologies.compile import FactsCache, compile_stage, describe, find_devices
    from rlhf_topologies.verdicts import judge_stage
    from sizes import FULL, TINY

    from rlhf_core.errors import error_line
    from rlhf_core.mesh import make_mesh
    from rlhf_core.runtime.machine import Planned, planning_for

    topologies = [parse(name) for name in names]
    first = topologies[0]
    mesh = make_mesh(devices=find_devices(first) if devices is None else devices)
    cache, written = FactsCache(first), {}
    with planning_for(Planned(first.chip.platform, 1, first.chip.usable)):
        stages: dict[str, Any] = {}
        for name, work in works(Bench(TINY if tiny else FULL, mesh)):
            if only not in name:
                continue
            say = partial(print, flush=True)
            compiled = partial(cache.compiled, stage=name, say=say)
            try:
                stages[name] = {**compile_stage(work(), compiled), "remat": "auto"}
            except Exception as error:  # one work must not take the others with it
                print(f"{name}: {error_line(error)}", flush=True)
                continue
            for topology in topologies:
                verdicts = {each: judge_stage(facts, topology, mesh.shape) for each, facts in stages.items()}
                judged = describe(topology, mesh.shape, cache.versions, verdicts)
                found = {"compiled_for": first.name, **judged}
                written[topology.chip.name] = found
                if not tiny:
                    merge(HERE / f"predicted_{topology.chip.name}.json", found)
    return written


def merge(file: Path, found: dict[str, Any]) -> None:
    """Write predictions; keep those of other works, if the same compiler made them."""
    from rlhf_core.runtime.files import write_atomic

    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    same = all(before.get(key) == found[key] for key in ("compiler", "compiled_for"))
    stages = {**(before["stages"] if same else {}), **found["stages"]}
    write_atomic(file, json.dumps({**found, "stages": stages}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("on", nargs="+", help="such as h200:1; the first is compiled for")
    parser.add_argument("--only", default="", help="works whose names contain this text")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        predict(given.on, given.only)
    else:
        sys.exit(start_in_compiler(__file__, given.on[0], sys.argv[1:]))


if __name__ == "__main__":
    main()
