"""Damage each file that a command reads: it is reported, repaired or without effect."""

from __future__ import annotations

import os
import random
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.torture import examples, runs, shim
from tests.torture.children import Child, rlhf
from tests.torture.experiment import Case, Trial

SHARE = 1.5
OF_EACH = 5
"""Damages of each sort of a file."""
BLOCK = 512
"""Bytes that are zeroed together: less than a disk's page, since the files are small."""
SECONDS = 90.0
LOGS = (
    "metrics.jsonl",
    "metrics.sha256",
    "events.jsonl",
    "best.json",
    "plan.json",
    "samples",
    "evaluations",
    "pipeline.resolved.toml",
)
"""Files, and folders of files, that nothing is computed from: damage may stay in them."""
ROWS = 16_000
"""Rows of the cached data set: enough that its files are hashed once, and its tokens cached."""


@dataclass(frozen=True)
class Scene:
    """A command, and the directory whose files it reads.

    source: copied for each case. damaged: the directory in it whose files are damaged. made: what the command writes,
    to be compared; None where other content cannot be noticed, as nothing holds its checksum. env: variables, with
    {directory} for the copy.
    """

    source: Path
    damaged: str
    command: tuple[str, ...]
    made: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    def start(self, directory: Path) -> Child:
        env = {name: value.format(directory=directory) for name, value in self.env.items()}
        return rlhf(*self.command, cwd=directory, env=env)


def run(trial: Trial) -> None:
    shim.require()
    prepared = Path(tempfile.mkdtemp(prefix="torture-damage-"))
    try:
        scenes = _scenes(prepared, None if trial.only is None else trial.only.split()[0])
        names = _in_turns({scene: list(_cases(scenes[scene])) for scene in scenes}, trial)
        trial.each(names, partial(_judge, scenes, prepared / "expected"), seconds=4 * SECONDS)
    finally:
        shutil.rmtree(prepared)


def _in_turns(cases: Mapping[str, list[str]], trial: Trial) -> list[str]:
    """Order the cases so that a short budget tries every scene and every sort of damage."""
    names = []
    for scene, own in cases.items():
        trial.random(scene).shuffle(own)
        seen: Counter[str] = Counter()
        for case in own:
            sort = case.split()[1]
            names.append((seen[sort], trial.random(scene, case).random(), f"{scene} {case}"))
            seen[sort] += 1
    return [name for _, _, name in sorted(names)]


def _scenes(prepared: Path, only: str | None) -> dict[str, Scene]:
    """Make runs and models, and below `prepared / "expected"` what commands make of them undamaged.

    only: the scene that is wanted; None: all of them.
    """
    scenes: dict[str, Scene] = {}
    if only in (None, "cache"):
        cached = prepared / "cached"
        cached.mkdir()
        runs.write(cached, *(stage.replace("= 4\nsave", "= 2\nsave") for stage in (runs.SFT, runs.REWARD)))
        runs.write_data(cached / "data", rows=ROWS)
        data = {"RLHF_CACHE": "{directory}/cache"}
        scenes["cache"] = Scene(cached, "cache", ("run", "p.toml"), "run", data)
        warming = scenes["cache"].start(cached)  # beside the runs
    if only != "cache":
        scenes |= _scenes_of_runs(prepared / "running", prepared / "finished", prepared / "expected")
    if "cache" in scenes:
        _require(warming)
        shutil.copytree(cached, prepared / "expected" / "cache")
        shutil.rmtree(cached / "run")
    return scenes


def _scenes_of_runs(running: Path, finished: Path, expected: Path) -> dict[str, Scene]:
    running.mkdir()
    runs.write(running, runs.SFT, runs.REWARD, runs.GRPO + "lora = { rank = 2 }\n")
    at = shim.Call("rename", 0, "run/policy/checkpoints/6")
    killed = shim.environment(running, at=at, action="killed")
    _require(rlhf("run", "p.toml", cwd=running, env=killed), -9)
    shutil.copytree(running, finished)
    _require(rlhf("run", "p.toml", cwd=finished))
    base, reward, policy = (f"run/{stage}/artifacts/model" for stage in ("base", "rm", "policy"))
    for child in (
        rlhf("export", base, "plain", cwd=finished),
        rlhf("export", policy, "adapter", cwd=finished),
    ):
        _require(child)
    _require(Child(examples.write_sharded, finished / "plain", finished / "sharded"))
    rows, out = "data/prompts.heldout.jsonl", ("-o", "out.jsonl")
    short = ("--max_completion_length", "4")
    scenes = {
        "running": Scene(running, "run", ("run", "p.toml"), "run"),
        "finished": Scene(finished, "run", ("run", "p.toml"), "run"),
        "check": Scene(running, "run", ("check", "p.toml")),
        "report": Scene(finished, "run", ("report", "run")),
        "score": Scene(finished, reward, ("score", reward, "data/pairs.heldout.jsonl", *out), out[1]),
        "generate": Scene(finished, policy, ("generate", policy, rows, *out, *short), out[1]),
        "export": Scene(finished, base, ("export", base, "out"), "out"),
        "plain": Scene(finished, "plain", ("generate", "plain", rows, *out, *short)),
        "sharded": Scene(finished, "sharded", ("generate", "sharded", rows, *out, *short)),
        "adapter": Scene(finished, "adapter", ("generate", "adapter", rows, *out, *short)),
    }
    for name in ("running", "finished"):
        shutil.copytree(finished, expected / name)
    for name in ("score", "generate", "export"):
        shutil.copytree(finished, expected / name)
        _require(scenes[name].start(expected / name))
    return scenes


def _require(child: Child, code: int = 0) -> None:
    ended = child.wait(4 * SECONDS)
    if ended.code != code:
        raise RuntimeError(f"without damage it {ended}")


def _cases(scene: Scene) -> Iterator[str]:
    """Yield "PATH SORT NUMBER" for every damage of every file and directory."""
    for name, path in _named(scene.source / scene.damaged).items():
        for sort in ("mixed",) if path.is_dir() else ("flip", "cut", "zero", "swap"):
            if sort not in ("mixed", "swap") or _others(scene.source / scene.damaged, path):
                yield from (f"{name} {sort} {number}" for number in range(OF_EACH))


def _named(directory: Path) -> dict[str, Path]:
    """Name every file and directory below a directory, those with random names by their size and content."""
    paths = [
        Path(folder, name) for folder, folders, files in os.walk(directory) for name in (*folders, *files)
    ]
    paths.sort(key=lambda path: (path.stat().st_size, path.read_bytes()) if path.is_file() else (0, b""))
    named: dict[str, Path] = {}
    for path in paths:
        name = re.sub(r"[0-9a-f]{16,}", "*", path.relative_to(directory).as_posix())
        count = sum(1 for each in named if each.split("#")[0] == name)
        named[f"{name}#{count}" if count else name] = path
    return dict(sorted(named.items()))


def _others(root: Path, path: Path) -> list[Path]:
    """List what a path might be mistaken for: its siblings, and those of its name elsewhere."""
    alike = [other for other in root.rglob(path.name) if other.parent != path.parent]
    others = [*path.parent.iterdir(), *alike]
    return sorted(
        other
        for other in others
        if other.is_dir() == path.is_dir()
        and path not in (other, *other.parents)
        and other not in path.parents
    )


def _damage(root: Path, path: Path, sort: str, draw: random.Random) -> None:
    if sort in ("swap", "mixed"):
        other = draw.choice(_others(root, path))
        _copy(other, path)
        return
    content = bytearray(path.read_bytes())
    at = draw.randrange(max(1, len(content)))
    if sort == "flip" and content:
        content[at] ^= 1 << draw.randrange(8)
    elif sort == "cut":
        del content[at:]
    elif sort == "zero":
        at -= at % BLOCK
        content[at : at + BLOCK] = bytes(len(content[at : at + BLOCK]))
    path.write_bytes(content)


def _judge(scenes: Mapping[str, Scene], expected: Path, case: Case) -> None:
    name, file, sort, _ = case.name.split()
    scene, directory = scenes[name], case.directory / "files"
    shutil.copytree(scene.source, directory)
    root = directory / scene.damaged
    path = _named(root)[file]
    before = _bytes(path)
    _copy(path, case.directory / "whole")
    _damage(root, path, sort, case.random)
    if _bytes(path) == before:
        case.count("damages without a difference")
        return
    ended = scene.start(directory).wait(SECONDS)
    if ended.traceback or ended.code not in (0, 1, 2):
        case.fail(str(ended))
        return
    if ended.code:
        case.count("reported")
        if not _is_named(path.relative_to(directory), ended.err):
            case.fail(f"the message does not name {path.relative_to(directory)}: {ended}")
        if name != "running":
            return
        _copy(case.directory / "whole", path)  # a refusal must have done no harm
        ended = scene.start(directory).wait(SECONDS)
        if ended.code:
            case.fail(f"with the file put back it {ended}")
            return
    elif scene.made is not None and _is_log(path.relative_to(root)):
        then = expected / name / path.relative_to(directory)
        if then.exists() and _bytes(path) != _bytes(then):
            case.count("kept as damaged in a log")
            _copy(then, path)
    for line in _differences(scene, expected / name, directory):
        case.fail(f"without a word about {path.relative_to(directory)}: {line}\n{ended}")
    case.count("with an equal result")


def _is_log(path: Path) -> bool:
    return any(part in LOGS for part in path.parts)


def _is_named(path: Path, message: str) -> bool:
    """Return whether a message names a path, a directory around it below the run, or the output that it belongs to."""
    around = [str(path), *map(str, list(path.parents)[:-2] or [path.parent])]
    output = [f"{path.parts[1]}.model"] if "artifacts" in path.parts else []
    return any(each in message for each in (*around, *output))


def _bytes(path: Path) -> dict[str, bytes] | bytes | None:
    if path.is_file():
        return path.read_bytes()
    return {
        file.as_posix()[len(path.as_posix()) :]: file.read_bytes()
        for file in path.rglob("*")
        if file.is_file()
    }


def _copy(source: Path, target: Path) -> None:
    """Copy a file or directory in place of another."""
    if target.is_dir():
        shutil.rmtree(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, target) if source.is_dir() else shutil.copyfile(source, target)


def _differences(scene: Scene, expected: Path, actual: Path) -> list[str]:
    if scene.made is None:
        return []
    if scene.made == "run":
        for path in (actual / "run").rglob("*.jsonl"):  # samples name the files of their rows
            path.write_bytes(path.read_bytes().replace(bytes(actual), bytes(scene.source)))
        lines = runs.differences(expected / "run", actual / "run")
        return [line for line in lines if not line.startswith("events.jsonl ")]  # warnings are events
    same = _bytes(expected / scene.made) == _bytes(actual / scene.made)
    return [] if same else [f"{scene.made} differs"]
