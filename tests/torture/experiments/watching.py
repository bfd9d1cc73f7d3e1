"""The server of `rlhf watch`: hostile texts in every field, files that are cut, changed, half written and gone.

Every request of a stream that is mostly nearly right has an answer that was foreseen, in JSON that has no NaN. The run
is not written, and is shown as before once its files are whole again.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random

from rlhf_report.watch.server import make_app
from rlhf_report.watch.watched import Watched
from starlette.testclient import TestClient

from tests.shared.page_requests import ALLOWED, requests
from tests.torture import browser, runs
from tests.torture.children import rlhf
from tests.torture.experiment import Case, Trial
from tests.torture.hostile.inputs import plant_text

SHARE = 0.5
ADDRESS = "http://127.0.0.1:8080"
REQUESTS, EVERY = 1000, 20
"""Requests of a case, and after how many a file is damaged."""


def run(trial: Trial) -> None:
    names = [f"{damage} {text}" for damage in DAMAGES for text in browser.HTML]
    trial.random().shuffle(names)
    with tempfile.TemporaryDirectory(prefix="torture-watching-") as folder:
        prepared = Path(folder) / "prepared"
        runs.write(prepared, runs.SFT, runs.REWARD, runs.GRPO)
        ended = rlhf("run", "p.toml", cwd=prepared).wait(240)
        if ended.code:
            raise RuntimeError(f"the run from which the others are made {ended}")
        trial.each(names, lambda case: _judge(case, prepared / "run"), seconds=300)


def _cut(path: Path, random: Random) -> None:
    os.truncate(path, random.randrange(path.stat().st_size))


def _flip(path: Path, random: Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(random.randint(1, 20)):
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(content)


def _write_half(path: Path, random: Random) -> None:
    content = path.read_bytes()
    with path.open("ab") as file:
        file.write(content[: random.randrange(len(content))])


def _remove(path: Path, random: Random) -> None:
    if random.random() < 0.3:
        shutil.rmtree(path.parent)
    else:
        path.unlink()


DAMAGES: dict[str, Callable[[Path, Random], None]] = {
    "cut": _cut,
    "flipped": _flip,
    "half written": _write_half,
    "gone": _remove,
}


def _judge(case: Case, prepared: Path) -> None:
    damage, text = next(
        (DAMAGES[name], browser.HTML[case.name.removeprefix(f"{name} ")])
        for name in DAMAGES
        if case.name.startswith(f"{name} ")
    )
    os.environ["XDG_CACHE_HOME"] = str(case.directory / "cache")
    run = case.directory / "runs" / "run"
    shutil.copytree(prepared, run)
    plant_text(run, text)
    whole = case.directory / "whole"
    shutil.copytree(run, whole)
    client = TestClient(make_app(Watched([run.parent])), base_url=ADDRESS, raise_server_exceptions=False)
    id = client.get("/api/runs").json()["runs"][0]["id"]
    before = _shown(client, id)
    stream = requests(case.random.random(), id)
    for place in range(REQUESTS):
        if place % EVERY == EVERY - 1:
            files = [path for path in sorted(run.rglob("*")) if path.is_file() and path.stat().st_size]
            if files:
                damage(case.random.choice(files), case.random)
        marks = _marks(run)
        method, path, headers, body = next(stream)
        answer = client.request(method, ADDRESS + path, headers=headers, content=body)
        case.require(
            answer.status_code in ALLOWED, f"{method} {path} {headers}: {answer.status_code} {answer.text}"
        )
        case.require(_marks(run) == marks, f"{method} {path}: the run was written")
        if answer.content and answer.headers["content-type"] == "application/json":
            json.loads(answer.content, parse_constant=case.fail)
        case.count("requests")
        case.count("shown", answer.status_code == 200)
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(whole, run)
    case.require(
        _shown(client, id) == before, "a run that is whole again is shown in another way than before"
    )


def _marks(run: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in run.rglob("*")}


def _shown(client: TestClient, id: str) -> str:
    stages = client.get(f"/api/runs/{id}").json()["stages"]
    return json.dumps(
        [[stage["name"], stage["update"], stage["verdict"], stage["rollouts"]] for stage in stages]
    )
