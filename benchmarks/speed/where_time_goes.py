"""Show where the time of an update of W1 or W2 goes, function by function.

    python benchmarks/speed/where_time_goes.py --work W1 [--model 50m] [--steps 10]

XLA traces updates while they run. An operation belongs to the innermost function that its metadata names, a fusion to
that of its result. Its time runs from its start to its end, however many threads it uses, and operations may overlap.
A loop's time is that of the operations in it.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import works

FEWEST = 0.005
"""Share of all time below which a function is not shown by itself."""


class Spent(NamedTuple):
    """Seconds, and how many times an operation ran."""

    seconds: float = 0.0
    calls: float = 0.0

    def __add__(self, other: Any) -> Spent:
        return Spent(self.seconds + other.seconds, self.calls + other.calls)


class Program:
    """The operations of a compiled program: which are products, which are loops, and where they were written."""

    def __init__(self, text: str) -> None:
        self.name = text.partition(",")[0].removeprefix("HloModule ")
        self._tables = {name: dict(_table(text, name)) for name in ("FileNames", "FunctionNames")}
        self._locations = dict(_table(text, "FileLocations"))
        self._frames = dict(_table(text, "StackFrames"))
        self._lines: dict[str, str] = {}
        self._bodies: dict[str, str] = {}
        body = ""
        for line in text.splitlines():
            if found := re.match(r"(?:ENTRY )?%([\w.-]+) \(.*\{$", line):
                body = found[1]
            elif found := re.match(r"\s+(?:ROOT )?%([\w.-]+) = ", line):
                self._lines[found[1]] = line
                self._bodies[body] = self._bodies.get(body, "") + line

    def is_loop(self, operation: str) -> bool:
        return bool(re.search(r" (while|conditional|call)\(", self._lines[operation]))

    def is_product(self, operation: str) -> bool:
        line = self._lines[operation]
        called = re.search(r"calls=%([\w.-]+)", line)
        return " dot(" in line + (self._bodies.get(called[1], "") if called else "")

    def function(self, operation: str) -> str:
        """Return the file and the outermost function around the place: "models/attention.py _forward_blocks"."""
        frame = re.search(r"stack_frame_id=(\d+)", self._lines[operation])
        if frame is None:
            return "(moved by the compiler)"
        location = self._locations[_number(self._frames[frame[1]], "file_location_id")]
        file = self._tables["FileNames"][_number(location, "file_name_id")].strip('"')
        function = self._tables["FunctionNames"][_number(location, "function_name_id")].strip('"')
        name = re.sub(r".*/(rlhf_core|plugins|site-packages)/", "", file)
        return f"{name} {function.partition('.<locals>')[0]}"


def _table(text: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield the numbers and the values of one of the tables before the first computation."""
    for line in text.partition(f"\n{name}\n")[2].partition("\n\n")[0].splitlines():
        number, _, value = line.partition(" ")
        yield number, value


def _number(entry: str, field: str) -> str:
    found = re.search(rf"{field}=(\d+)", entry)
    assert found is not None
    return found[1]


def traced(directory: Path, program: Program) -> dict[str, Spent]:
    """Read a trace: what each operation of the program took, from its start to its end, whichever threads it had."""
    import jax

    spent: dict[str, Spent] = defaultdict(Spent)
    (file,) = directory.rglob("*.xplane.pb")
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            for event in line.events:
                if dict(event.stats).get("hlo_module") == program.name:
                    spent[event.name] += Spent(event.duration_ns / 1e9, 1)
    return spent


def measure(task: works.Task) -> None:
    """Trace the updates of the work, and print the table."""
    from rlhf_core import runtime

    runtime.prepare()
    import jax
    import ours_steps

    from rlhf_core.mesh import put_rows
    from rlhf_core.step import Programs

    with tempfile.TemporaryDirectory(prefix="speed-") as name:
        directory = Path(name)
        make = ours_steps.reward_update if task.work == "W1" else ours_steps.policy_update
        objective, updates, state = make(task, directory)
        programs = Programs(objective, state, values=ours_steps.VALUES[task.work])
        batch = put_rows(state.step.sharding.mesh, updates.update(0, state).batches[0])
        texts = [programs.lower(state, batch, False).compile().as_text()]
        texts.append(programs.lower_apply(state).compile().as_text())

        def update(state: Any) -> Any:
            return programs.apply(state, programs.accumulate(state, batch, None))[0]

        for _ in range(works.WARM_UP):
            state = jax.block_until_ready(update(state))
        begin, processor = time.perf_counter(), time.process_time()
        with jax.profiler.trace(str(directory / "trace")):
            for _ in range(task.steps):
                state = jax.block_until_ready(update(state))
            seconds, processor = time.perf_counter() - begin, time.process_time() - processor
        functions: dict[str, list[Spent]] = defaultdict(lambda: [Spent(), Spent()])
        for program in map(Program, texts):
            for operation, spent in traced(directory / "trace", program).items():
                if not program.is_loop(operation):
                    functions[program.function(operation)][program.is_product(operation)] += spent
    show(functions, task.steps)
    print(
        f"an update took {1e3 * seconds / task.steps:.1f} ms, with {processor / seconds:.2f} cores at work on average"
    )


def show(functions: dict[str, list[Spent]], steps: int) -> None:
    """functions: what is spent on other operations and on products in each, over all steps."""
    whole = sum(spent.seconds for both in functions.values() for spent in both)
    print(f"{'ms per update':60} products   others  operations   share")
    small = [Spent(), Spent()]
    for function, both in sorted(functions.items(), key=lambda each: -sum(s.seconds for s in each[1])):
        if sum(spent.seconds for spent in both) < FEWEST * whole:
            small = [a + b for a, b in zip(small, both, strict=True)]
        else:
            print(_line(function, both, whole, steps))
    print(_line("(functions below half a percent)", small, whole, steps))
    totals = [sum((both[i] for both in functions.values()), Spent()) for i in range(2)]
    print(_line("all", totals, whole, steps))


def _line(name: str, both: list[Spent], whole: float, steps: int) -> str:
    other, product = (1e3 * spent.seconds / steps for spent in both)
    calls = sum(spent.calls for spent in both) / steps
    share = sum(spent.seconds for spent in both) / whole
    return f"{name:60} {product:8.2f} {other:8.2f} {calls:11.0f} {share:7.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Show where the time of an update goes.")
    works.add_arguments(parser)
    task = works.task_of(parser.parse_args())
    if task.work not in ("W1", "W2"):
        raise SystemExit(f"PROFILE=1 profiles an update, which {task.work} is not: give WORK=W1 or WORK=W2")
    measure(task)


if __name__ == "__main__":
    main()
