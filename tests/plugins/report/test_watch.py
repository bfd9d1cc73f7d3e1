"""`rlhf watch`: its routes give what the files have, to whom they may, and go on whatever the files hold."""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from rlhf_report.watch import growing
from rlhf_report.watch.growing import GrowingRows, ends
from rlhf_report.watch.server import hosts_of, make_app
from rlhf_report.watch.table import spark, table
from rlhf_report.watch.watched import Watched
from starlette.testclient import TestClient

from rlhf_core import InputError, RewardInputs
from rlhf_core.rollouts import Rollout
from rlhf_core.rollouts.journal import Journal, JournalEntry
from rlhf_core.sampling import Rollouts
from tests.shared.page_requests import ALLOWED, requests
from tests.shared.report_runs import EVIL, make_run, write

ADDRESS = "http://127.0.0.1:8080"
PROMPTS, GROUP, LONGEST = 3, 4, 7


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Page:
    """What a browser reads."""

    def __init__(self, *directories: Path, key: str | None = None) -> None:
        self.watched = Watched(directories)
        self.client = TestClient(make_app(self.watched, key=key), base_url=ADDRESS)

    def __call__(self, path: str, status: int = 200) -> Any:
        answer = self.client.get(f"/api/{path}")
        assert answer.status_code == status, answer.text
        return answer.json()

    def runs(self) -> dict[str, Any]:
        return {run["name"]: run for run in self("runs")["runs"]}

    def id(self, name: str) -> str:
        return str(self.runs()[name]["id"])

    def alarm(self, name: str) -> str | None:
        """Return what the list warns of once the run was read in the background."""
        self.runs()
        assert self.watched.alarms is not None
        self.watched.alarms.wait(60)
        alarm: str | None = self.runs()[name]["alarm"]
        return alarm


def rollout(number: int, word: str = "plain") -> Rollout:
    """Completions of three prompts; of the first group two are equal, and one was cut."""
    rng = np.random.default_rng(number)
    count = PROMPTS * GROUP
    lengths = rng.integers(2, LONGEST + 1, count).astype(np.int32)
    there = np.arange(LONGEST) < lengths[:, None]
    lengths[1] = lengths[0]
    there[1] = there[0]
    finished = np.ones(count, bool)
    finished[2] = False
    total = rng.normal(size=count)
    total[1] = total[0]
    texts = [f"reply {number} {i} {word} {EVIL}" for i in range(count)]
    texts[1] = texts[0]
    inputs = RewardInputs(
        prompts=[f"prompt {number + i // GROUP}" for i in range(count)],
        completions=texts,
        completion_ids=[[1]] * count,
        columns={},
    )
    samples = Rollouts(
        tokens=rng.integers(5, 90, (count, LONGEST)).astype(np.int32),
        lengths=lengths,
        logps=-rng.exponential(size=(count, LONGEST)).astype(np.float32),
        finished=finished,
        mask=there,
        version=np.full(count, max(number - 1, 0), np.int32),
    )
    rows = np.arange(number, number + PROMPTS)
    return Rollout(rows, samples, total[:, None], total, inputs, number=number)


class Scorer:
    label, weight = "judge", 1.0


def journal(stage: Path, *rollouts: Rollout) -> None:
    (stage / "journal").mkdir(exist_ok=True)
    kept = Journal(stage / "journal", (), writes=True)
    for each in rollouts:
        kept.write(JournalEntry(each, [each.number], {}), [Scorer()])  # type: ignore[list-item]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the completions of three rollouts, which serve one update each."""
    run = make_run(tmp_path_factory.mktemp("runs") / "first")
    shutil.rmtree(run / "policy/samples")
    journal(run / "policy", rollout(0), rollout(1, "Needle"), rollout(2))
    return run


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "runs/first", symlinks=True))


def test_a_growing_file_is_read_where_it_grew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = GrowingRows(path)
    lines.refresh()
    assert lines.rows == []
    path.write_text('{"step": 1}\n{"step": 2}\nno row\n{"ste')
    lines.refresh()
    assert [row["step"] for row in lines.rows] == [1, 2]
    assert lines.damaged == 1
    parsed: list[bytes] = []
    plain = growing.parse
    monkeypatch.setattr(growing, "parse", lambda line: parsed.append(line) or plain(line))
    with path.open("a") as file:
        file.write('p": 3}\n')
    lines.refresh()
    lines.refresh()
    assert parsed == [b'{"step": 3}\n']
    assert [row["step"] for row in lines.rows] == [1, 2, 3]
    path.write_text('{"step": 1}\n{"step": 9}\n{"step": 10}\n{"step": 11}\n')  # cut, and grown again
    lines.refresh()
    assert [row["step"] for row in lines.rows] == [1, 9, 10, 11]


def test_the_list_reads_the_ends_of_long_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "m.jsonl", [{"step": i, "loss": 1 / i, "text": "x" * 200} for i in range(1, 5001)])
    spread, last = ends(tmp_path / "m.jsonl")
    assert last[-1]["step"] == 5000
    assert len(spread) == growing.PIECES
    assert [row["step"] for row in spread] == sorted(row["step"] for row in spread)
    assert spread[0]["step"] == 1
    assert np.diff([row["step"] for row in spread]).max() < 2 * 5000 / growing.PIECES

    read: list[int] = []

    class Counting(io.FileIO):
        def read(self, size: int = -1) -> bytes:
            read.append(size)
            return bytes(super().read(size) or b"")

    monkeypatch.setattr(growing, "open", Counting, raising=False)
    ends(tmp_path / "m.jsonl")
    assert sum(read) == growing.END + growing.PIECES * growing.PIECE


def test_states_of_runs(run: Path) -> None:
    page = Page(run.parent)
    assert page.runs()["first"]["state"] == "finished"
    spec = json.loads((run / "policy/stage.json").read_text()) | {"state": "running"}
    (run / "policy/stage.json").write_text(json.dumps(spec))
    (run / "policy/plan.json").write_text(json.dumps({"updates": 40}))
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    write(run / "events.jsonl", events[:-1])
    assert page.runs()["first"]["state"] == "stopped"
    with open(run / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        entry = page.runs()["first"]
        found = [entry[name] for name in ("state", "stage", "update", "updates")]
        assert found == ["running", "policy", 20, 40]
        assert entry["seconds_left"] == pytest.approx(40)  # 2 s for each of 20 updates
        assert next(iter(entry["metrics"])) == "reward"
        assert len(entry["spark"]["values"]) == 20
    write(
        run / "events.jsonl",
        [*events[:-1], {"time": 1.9e9, "stage": "policy", "event": "failed", "message": EVIL}],
    )
    entry = page.runs()["first"]
    assert (entry["state"], entry["error"]) == ("failed", EVIL)
    shutil.rmtree(run)
    assert page.runs() == {}
    run.parent.rename(run.parent.with_name("elsewhere"))
    assert page("runs") == {"runs": [], "problems": [f"{run.parent}: is not there yet, or not any more"]}


def test_a_run_grows_while_it_is_watched(run: Path) -> None:
    page = Page(run)
    id = page.id("first")
    stages = {stage["name"]: stage for stage in page(f"runs/{id}")["stages"]}
    assert stages["policy"]["update"] == 20
    assert stages["policy"]["rollouts"] == [1, 2, 3]
    assert "87.5% of 4 held-out pairs" in stages["rm"]["verdict"][0]["text"]
    with (run / "policy/metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "time": 1.9e9, "reward": 0.1, "new": 3}\n')
    journal(run / "policy", rollout(3))
    stages = {stage["name"]: stage for stage in page(f"runs/{id}")["stages"]}
    assert stages["policy"]["update"] == 21
    assert "new" in stages["policy"]["metrics"]
    assert stages["policy"]["rollouts"] == [1, 2, 3, 4]
    rows = page(f"runs/{id}/policy/metrics?after=20&names=reward")["rows"]
    assert rows == [{"step": 21, "time": 1.9e9, "reward": 0.1}]
    assert page(f"runs/{id}/policy/rollouts?update=4")["rollout"] == 3


def test_numbers_are_those_of_the_journal(run: Path) -> None:
    wanted = rollout(1, "Needle")
    mask = wanted.samples.mask
    values = {
        name: np.random.default_rng(i).normal(size=int(mask.sum())).astype(np.float32)
        for i, name in enumerate(("trainer_logps", "entropies", "variances"))
    }
    values["entropies"][0] = np.nan
    (run / "policy/values").mkdir()
    np.savez(run / "policy/values/000001.npz", **values)
    page = Page(run)
    address = f"runs/{page.id('first')}/policy/rollouts"
    shown = page(f"{address}?update=2")
    assert (shown["rollout"], shown["total"], len(shown["groups"])) == (1, PROMPTS, PROMPTS)
    first = shown["groups"][0]
    assert [one["copies"] for one in first["completions"]] == [2, 1, 1]
    assert first["completions"][0]["indices"] == [0, 1]
    assert [one["finish"] for one in first["completions"]] == ["stop", "length", "stop"]
    assert (first["row"], first["previous"], first["next"]) == (1, 1, None)
    assert shown["groups"][1]["next"] == 3
    for group in shown["groups"]:
        for one in group["completions"]:
            assert one["reward"] == wanted.total[one["index"]]
            assert (one["version"], one["age"]) == (0, 1)
    before = 0
    for i, length in enumerate(wanted.samples.lengths):
        found = page(f"{address}/1/completions/{i}")
        count = int(mask[i].sum())
        assert found["ids"] == wanted.samples.tokens[i, :length].tolist()
        for name, exact in (
            ("sampler_logps", wanted.samples.logps[i, :count]),
            *((name, values[name][before : before + count]) for name in values),
        ):
            there = np.array(found[name], np.float32)
            np.testing.assert_array_equal(
                there.view(np.int32)[~np.isnan(exact)], exact.view(np.int32)[~np.isnan(exact)]
            )
            assert [each is None for each in found[name]] == np.isnan(exact).tolist()
        before += count
    page(f"{address}/1/completions/{PROMPTS * GROUP}", 404)
    page(f"{address}?update=9", 404)


def test_completions_are_sorted_filtered_and_found(run: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in sorted(run.rglob("*"))}
    page = Page(run)
    address = f"runs/{page.id('first')}/policy/rollouts"
    best = [
        max(one["reward"] for one in group["completions"])
        for group in page(f"{address}?update=1&sort=-reward")["groups"]
    ]
    assert best == sorted(best, reverse=True)
    assert max(best) == rollout(0).total.max()
    spreads = [group["spread"] for group in page(f"{address}?update=1&sort=spread")["groups"]]
    assert spreads == sorted(spreads)
    cut = page(f"{address}?update=1&finish=length")
    assert [one["index"] for group in cut["groups"] for one in group["completions"]] == [2]
    few = page(f"{address}?update=1&where=judge&least=0.5")
    assert few["total"] < PROMPTS or all(
        one["rewards"]["judge"] >= 0.5 for g in few["groups"] for one in g["completions"]
    )
    found = page(f"{address}?search=nEEdle&limit=2")
    assert (found["total"], [group["update"] for group in found["groups"]]) == (PROMPTS, [2, 2])
    third = page(f"{address}?search=reply 2 5")
    assert [one["index"] for group in third["groups"] for one in group["completions"]] == [5]
    assert page(f"{address}?search=nowhere")["total"] == 0
    for sort in ("-reward", "length", "-spread"):
        every = page(f"{address}?search=reply&sort={sort}")["groups"]
        parts = [group for u in (1, 2, 3) for group in page(f"{address}?update={u}")["groups"]]
        key = {
            "-reward": lambda g: -max(o["reward"] for o in g["completions"]),
            "length": lambda g: min(o["length"] for o in g["completions"]),
            "-spread": lambda g: -g["spread"],
        }[sort]
        assert list(map(key, every)) == sorted(map(key, parts))
    journal(run / "policy", rollout(1, "Straw"))
    assert page(f"{address}?search=needle")["total"] == 0
    assert page(f"{address}?search=straw")["total"] == PROMPTS
    after = {path: path.stat().st_mtime_ns for path in sorted(run.rglob("*"))}
    changed = {path for path in after if after[path] != before.get(path)}
    assert {path.name for path in changed} <= {"journal", "rollout-000001.zip"}
    (index,) = (tmp_path / "cache/rlhf/watch").glob("*.sqlite")
    assert index.stat().st_mode & 0o77 == 0
    index.write_bytes(b"no database")
    assert page(f"{address}?search=straw")["total"] == PROMPTS


def test_what_is_damaged_is_said(run: Path) -> None:
    page = Page(run)
    id = page.id("first")
    path = run / "policy/journal/rollout-000001.zip"
    whole = path.read_bytes()
    for content in (b"", whole[: len(whole) // 2], b"PK" + b"\0" * 100):
        path.write_bytes(content)
        page(f"runs/{id}/policy/rollouts?update=2", 404)
        assert page(f"runs/{id}/policy/rollouts?search=reply")["total"] == 2 * PROMPTS
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("rollout.json", "[]")
        file.writestr("samples.json", '[{"completion": 3, "reward": "x", "rewards": 7, "turns": 1}]')
    page(f"runs/{id}/policy/rollouts?update=2")
    page(f"runs/{id}/policy/rollouts/1/completions/0", 404)
    with (run / "policy/metrics.jsonl").open("a") as file:
        file.write('no row\n{"step": [], "reward": NaN}\n{"step": 30, "reward": NaN, "kl": 1e999}\n')
    answer = page(f"runs/{id}")
    assert any("damaged line" in problem for problem in answer["problems"])
    assert page(f"runs/{id}/policy/metrics?after=29")["rows"] == [{"step": 30, "reward": None, "kl": None}]
    for name in ("stage.json", "plan.json", "best.json"):
        (run / "policy" / name).write_text('{"updates": "many", "config": 3, "model": []')
    for name in ("pipeline.resolved.toml", "events.jsonl"):
        (run / name).write_bytes(b"\xff\x00[[[")
    assert page(f"runs/{id}")["problems"]
    assert page.runs()["first"]["id"] == id
    shutil.rmtree(run / "policy")
    page(f"runs/{id}/policy/rollouts?update=1", 404)
    page(f"runs/{id}")
    shutil.rmtree(run)
    for route in ("", "/policy/metrics", "/policy/rollouts?update=1", "/policy/evaluations", "/events"):
        page(f"runs/{id}{route}", 404)


@pytest.mark.parametrize(
    "link", ["pipeline.resolved.toml", "policy/metrics.jsonl", "policy/samples", "policy"]
)
def test_links_that_leave_a_run_are_not_followed(run: Path, tmp_path: Path, link: str) -> None:
    page = Page(run.parent)
    id = page.id("first")
    secret = tmp_path / "secret"
    shutil.copytree(run / "policy", secret)
    (secret / "pipeline.resolved.toml").write_text("secret = 1")
    place = run / link
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
    target = {"policy": secret, "policy/samples": secret}.get(link, secret / place.name)
    place.symlink_to(target)
    assert "link" in page(f"runs/{id}", 404)["error"]["message"]
    for route in ("metrics", "rollouts?update=1", "rollouts?search=reply", "evaluations"):
        page(f"runs/{id}/policy/{route}", 404)
    assert "link" in Page(run.parent).runs()["first"]["error"]


@contextmanager
def nobody() -> Iterator[None]:
    """Be a user who may read only what everyone may."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(
    "closed", ["", "locked", "locked/policy", "locked/policy/journal", "locked/events.jsonl"]
)
def test_what_may_not_be_read_is_said_and_the_rest_is_shown(made: Path, closed: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        for name in ("first", "runs/locked"):
            shutil.copytree(made, Path(folder) / name, symlinks=True)
        for path in Path(folder).rglob("*"):
            os.chown(path, *((65534, 65534) if os.geteuid() == 0 else (-1, -1)))
        place = Path(folder) / "runs" / closed
        page = Page(Path(folder))
        ids = {name: run["id"] for name, run in page.runs().items()}
        routes = ("/policy/metrics", "/policy/rollouts?update=1", "/policy/rollouts?search=reply")
        for route in routes:  # what they import may not be read by everyone
            page(f"runs/{ids['first']}{route}")
        os.chmod(place, 0)
        with nobody():
            answer = page("runs")
            runs = {run["name"]: run for run in answer["runs"]}
            assert (runs["first"]["state"], runs["first"]["error"]) == ("finished", None)
            assert page(f"runs/{ids['first']}/policy/rollouts?update=1")["total"] == PROMPTS
            for route in routes:
                assert page.client.get(f"/api/runs/{ids['locked']}{route}").status_code in (200, 404)
            if "locked" in runs:
                shown = page.client.get(f"/api/runs/{ids['locked']}").json()
                said = [runs["locked"]["error"], *shown.get("problems", []), str(shown.get("error"))]
            else:
                said = answer["problems"]
            assert any("ermission denied" in str(each) for each in said), said
        os.chmod(place, 0o755)


def test_secrets_stay_hidden(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789abcdef")
    (run / "pipeline.resolved.toml").write_text('dir = "x"\ntoken = "hf_0123456789abcdef"\n')
    page = Page(run)
    assert "hf_0123" not in page.client.get(f"/api/runs/{page.id('first')}").text


def test_who_may_ask(run: Path) -> None:
    page = Page(run)
    client = page.client
    for host in ("localhost", "localhost:8080", "127.0.0.1:1", "[::1]", "[::1]:8080", "LOCALHOST"):
        assert client.get("/", headers={"Host": host}).status_code == 200
    others = (
        "evil.example",
        "127.0.0.1.evil.example",
        "",
        "localhost.",
        "x@localhost",
        "[::1",
        "10.0.0.1:8080",
    )
    for host in others:
        assert client.get("/api/runs", headers={"Host": host}).status_code == 400
    answer = client.get("/", headers={"Origin": "http://evil.example"})
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert not any(name.startswith("access-control") for name in answer.headers)
    tag = client.get("/api/runs").headers["ETag"]
    again = client.get("/api/runs", headers={"If-None-Match": f'"x", {tag}'})
    assert (again.status_code, again.content) == (304, b"")
    for path in ("/static/../server.py", "/static/%2e%2e%2fserver.py", "/static/%2e%2e", "/static/server.py"):
        assert client.get(path).status_code == 404
    assert client.post("/api/runs").status_code == 405
    assert client.post("/api/key", content=b"x" * 5000).status_code == 413


def test_a_key_opens_the_page_once_it_is_given(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    client = Page(run, key="a-long-key").client
    assert client.get("/").status_code == 200
    assert client.get("/static/main.js").status_code == 200
    assert client.get("/api/runs").status_code == 401
    bearer = {"Authorization": "Bearer a-long-key"}
    assert client.get("/api/runs?key=a-long-key", headers=bearer).status_code == 401
    for wrong in ({"key": "another"}, {"key": "é"}, {"key": 3}):
        assert client.post("/api/key", json=wrong).status_code == 401
    assert client.post("/api/key", content=b"no JSON").status_code == 400
    answer = client.post("/api/key", json={"key": "a-long-key"})
    assert answer.status_code == 200
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert "a-long-key" not in cookie
    assert client.get("/api/runs").status_code == 200
    assert "a-long-key" not in caplog.text
    for host in ("0.0.0.0", "::"):
        with pytest.raises(InputError, match="name the address"):
            hosts_of(host)


def test_the_command_refuses_an_address_elsewhere_without_a_key(rlhf: Any, run: Path) -> None:
    refused = rlhf("watch", str(run), "--host", "192.0.2.1")
    assert refused.code == 2
    assert "--api-key-env NAME" in refused.message
    assert "is a file" in rlhf("watch", str(run / "events.jsonl")).message


def test_runs_are_compared(run: Path, made: Path) -> None:
    other = Path(shutil.copytree(run, run.parent / "second"))
    spec = json.loads((other / "policy/stage.json").read_text())
    spec["config"]["learning_rate"] = 0.5
    (other / "policy/stage.json").write_text(json.dumps(spec))
    page = Page(run.parent)
    ids = [page.id(name) for name in ("first", "second")]
    found = page(f"compare?runs={','.join(ids)}")
    assert [each["name"] for each in found["runs"]] == ["first", "second"]
    policy = found["stages"][1]
    assert {"name": "learning_rate", "values": ["0.0001", "0.5"]} in policy["differences"]
    assert "reward" in policy["metrics"]
    prompt = policy["prompts"][0]
    assert prompt["completions"][0] == prompt["completions"][1] != None  # noqa: E711
    for runs in ("", ids[0], f"{ids[0]},{ids[0]}", ",".join(map(str, range(7)))):
        page(f"compare?runs={runs}", 400)
    page(f"compare?runs={ids[0]},nothing", 404)


def test_rows_and_evaluations_have_names_and_texts(run: Path, tmp_path: Path) -> None:
    data = tmp_path / "pairs.jsonl"
    write(data, [{"prompt": f"question {i}", "chosen": EVIL, "rejected": "no"} for i in range(5)])
    stage = run / "rm"
    spec = json.loads((stage / "stage.json").read_text())
    spec["config"] |= {"train_data": str(data), "eval_data": str(data)}
    (stage / "stage.json").write_text(json.dumps(spec))
    (stage / "rows").mkdir()
    values = np.array([0.1, 0.7, np.nan], np.float32)
    np.savez(stage / "rows/000004.npz", row=np.array([3, 1, 5]), value=values)
    for update, change in ((10, 0.0), (20, 1.0)):
        rows = [{"row": i + 1, "chosen": 0.5 + i * change, "rejected": 2 * i * change} for i in range(3)]
        (stage / f"evaluations/{update:06d}.json").write_text(
            json.dumps({"rows": rows, "metrics": {"eval_loss": 1.0}})
        )
    page = Page(run)
    assert str(page.alarm("first")).startswith("rm: 5 of 5 held-out prompts are in the training data")
    address = f"runs/{page.id('first')}/rm"
    rows = page(f"{address}/rows?update=4&sort=-loss")["rows"]
    assert [row["loss"] for row in rows] == [float(values[1]), float(values[0]), None]
    assert (rows[0]["row"], rows[0]["where"], rows[0]["scores"]) == (1, "pairs.jsonl row 1", {})
    assert rows[0]["text"].startswith("prompt: question 0\nchosen: </script>")
    page(f"{address}/rows?update=5", 404)
    found = page(f"{address}/evaluations/20")
    assert (found["before"], found["of"], found["falls"]) == (10, "margin", False)
    assert [row["change"] for row in found["rows"]] == [0.0, -1.0, -2.0]
    assert page(f"{address}/evaluations")["evaluations"][0]["metrics"] == {"eval_loss": 1.0}


UPDATES = np.arange(40)
LATE = UPDATES >= 20
NOISE = np.tile([0.1, -0.1], 20)
FLAT = {"reward": 1 + NOISE, "entropy": 1 + NOISE, "kl": UPDATES / 400, "loss": NOISE}
RISES = FLAT | {"reward": 1 + NOISE + UPDATES / 40}
FALLS = {"loss": 2 - UPDATES / 40}
STAYS = {"kl": 0 * UPDATES, "learning_rate": 1e-9 + 0 * UPDATES}


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        (FLAT, None),
        (RISES | {"entropy": 0.9**UPDATES}, None),  # it has learnt its task
        (
            FLAT | {"reward": 1 + NOISE - UPDATES / 40},
            "0.0975 nats per token at most, so its steps were not too",
        ),
        (FLAT | {"entropy": 0.9**UPDATES}, "collapsed: its entropy went from 1 nats per token to 0.02"),
        (FLAT | {"kl": UPDATES / 20}, "1.725 nats per token away from the reference, and no better"),
        (FLAT | {"kl": UPDATES / 20}, "and no better for it. By update 4 it was already more than 0.1 nats"),
        (FLAT | {"kl": UPDATES / 100}, "The reward did not rise by more than chance: it went from 1 in the"),
        (FLAT | {"kl": UPDATES**2 / 1000}, "It drifted: by update 12 it was more than 0.1 nats per token"),
        (FLAT | STAYS, "with a learning_rate of at most 1e-09: it has hardly moved"),
        ({"loss": 1 + NOISE + UPDATES / 40}, "The training loss rose from 1.113 in the first quarter"),
        ({"loss": 1 + NOISE + 4 * (abs(UPDATES - 5) < 3)}, "leapt from 1.1 to 5.03"),
        (FALLS, None),
        (FALLS | {"eval_loss": 1 + abs(UPDATES - 20) / 20}, "It overfits: the held-out loss"),
        (
            RISES | {"completions/mean_length": 10.0 + UPDATES},
            "completions went from 14.5 to 44.5 tokens: see",
        ),
        (RISES | {"kl": UPDATES**2 / 2000}, "while the KL to the reference ran away"),
        (
            RISES | {"rewards/r/mean": 1 + NOISE - UPDATES / 40},
            "Reward r fell from 0.8875 to 0.1375 while the",
        ),
        (FLAT | {"completions/clipped_ratio": LATE * 0.9}, "90% of the completions are cut at the limit"),
        (FALLS | {"accuracy": 0.5 + NOISE / 4}, "the higher score; guessing gives 50%. See whether"),
        (
            FALLS | {"accuracy": 1 + NOISE / 4, "eval_accuracy": 0.1 + NOISE / 4},
            "7.5% of the held-out pairs: worse",
        ),
        (FLAT | {"frac_reward_zero_std": LATE * 0.9}, "In 90% of the last groups all rewards are equal"),
        (FLAT | {"rewards/r/unscored": (UPDATES == 7) * 0.4}, "without a score, 40.0% of those of update 8"),
        (FLAT | {"rewards/r/failed": (UPDATES < 3) * 2.0}, "Calls of reward r failed in 3 updates"),
        (FLAT | {"grad_norm": np.where(LATE, np.nan, 1)}, "20 logged values of grad_norm were not finite."),
        (FLAT | {"sampling/surprisal_evidence": LATE * 12.0}, "the evidence against it is 10^12"),
    ],
)
def test_what_went_wrong_is_said_and_nothing_where_all_is_well(
    run: Path, metrics: dict[str, Any], said: str | None
) -> None:
    """Of a run, with a link to where it shows; and in the list, from the ends of its files."""
    rows = [
        {"step": i + 1, "time": 1.0} | {name: float(values[i]) for name, values in metrics.items()}
        for i in range(40)
    ]
    write(run / "policy/metrics.jsonl", [{n: None if v != v else v for n, v in row.items()} for row in rows])
    page = Page(run)
    alarm = page.alarm("first")
    stage = page(f"runs/{page.id('first')}")["stages"][1]
    warned = [each for each in stage["verdict"] if each["tone"] == "warning"]
    if said is None:
        assert (warned, alarm) == ([], None)
        assert len(stage["checked"]) > 1
        return
    assert said in warned[0]["text"]
    assert alarm == warned[0]["text"]
    assert warned[0]["see"] or {"grad_norm", "learning_rate"} & metrics.keys()


def test_files_tell_what_metrics_do_not(run: Path, tmp_path: Path) -> None:
    """That rewards follow length, what prompts without a score have in common, that the training data have others."""
    rollouts = [rollout(number) for number in range(9)]
    for each in rollouts:
        rows = each.prompts.repeat(GROUP)
        assert each.inputs is not None
        each.total[:] = np.where(rows % 3 == 0, np.nan, each.samples.lengths)
        each.inputs.prompts[:] = [f"a {'green' if row % 3 else 'red'} thing {row}" for row in rows]
    journal(run / "policy", *rollouts)
    data = [tmp_path / f"{name}.jsonl" for name in ("train", "held_out")]
    for path, first in zip(data, (0, 6), strict=True):
        write(path, [{"prompt": f"question {i}"} for i in range(first, first + 10)])
    stage = run / "policy"
    spec = json.loads((stage / "stage.json").read_text())
    spec["config"] |= {"train_data": str(data[0]), "eval_data": {"few": str(data[1])}}
    (stage / "stage.json").write_text(json.dumps(spec))
    rows = [{"step": i + 1, "time": 1.0, "rewards/judge/unscored": 1 / 3} for i in range(9)]
    write(run / "policy/metrics.jsonl", rows)
    (run / "audit.json").write_text('{"stages": {"policy": [{"name": "x", "verdict": "pass"}, 3], "rm": 4}}')
    page = Page(run)
    id = page.id("first")
    found = {each["text"]: each["see"] for each in page(f"runs/{id}")["stages"][1]["verdict"]}
    said = " ".join(found)
    assert "By rlhf audit, all of the 1 promises that it could check hold." in said
    assert "4 of 10 held-out prompts are in the training data, too" in said
    assert "Longer completions have the higher rewards" in said
    assert "length explains 100% of the variance" in said
    assert "without a score. All of them have “red”, which none of" in said
    see = next(see for text, see in found.items() if "“red”" in text)
    shown = page(f"runs/{id}/policy/rollouts?update=1&where=judge&without=1")
    assert see["query"] == {"where": "judge", "without": "1"}
    assert [group["row"] for group in shown["groups"]] == [0]
    (stage / "evaluations").mkdir(exist_ok=True)
    held_out = [{"row": 1, "reward": 1.0}, {"row": 5, "reward": 2.0}]
    write(stage / "evaluations/000009.json", [{"rows": held_out}])
    leaks = [row.get("leak") for row in page(f"runs/{id}/policy/evaluations/9")["rows"]]
    assert leaks == ["train.jsonl row 7", None]
    first = "4 of 10 held-out prompts are in the training data, too"
    assert page.alarm("first").startswith(first)
    assert Page(run).runs()["first"]["alarm"].startswith(first), "it was kept"
    for kept in (tmp_path / "cache/rlhf/watch").glob("*.json"):
        assert kept.stat().st_mode & 0o77 == 0
        kept.write_text('{"alarm": 3}')
    assert Page(run).alarm("first").startswith(first)
    checks = [{"name": "rewards", "verdict": "FAIL", "why": "0.5 apart"}, {"name": "x", "verdict": "pass"}]
    (run / "audit.json").write_text(json.dumps({"stages": {"policy": checks}}))
    os.utime(run / "audit.json", (1, 1))
    found = page(f"runs/{id}")["stages"][1]["verdict"]
    assert (
        "By rlhf audit, before its last updates, 1 of 2 promises do not hold. rewards: 0.5 apart"
        in found[0]["text"]
    )


def test_a_run_that_goes_on_is_judged_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    judge = lambda run: time.sleep(0.05) or read.append(run) or f"{len(read)}"  # noqa: E731
    monkeypatch.setattr("rlhf_report.watch.alarms._first_warning", judge)
    alarms: Any = Watched([tmp_path]).alarms
    for is_running, size, count in ((True, 1, 1), (True, 2, 1), (False, 3, 2), (False, 3, 2), (False, 4, 3)):
        alarms.of(tmp_path, (is_running, size))
        alarms.wait(60)
        assert len(read) == count
    kept: Any = Watched([tmp_path]).alarms
    assert kept.of(tmp_path, (False, 4)) == "3"


def test_the_table_of_a_terminal(run: Path) -> None:
    console = Console(width=150, file=open(os.devnull, "w"), record=True)  # noqa: SIM115
    console.print(table(Watched([run]).runs()))
    text = console.export_text()
    assert "first" in text
    assert "finished" in text
    assert "reward" in text
    assert spark({"values": [0.0, 1.0, 0.5]}) == "▁█▅"
    assert spark(None) == ""


def fuzz(run: Path, seed: int, count: int) -> None:
    page = Page(run)
    made = requests(seed, page.id("first"))
    for _ in range(count):
        method, path, headers, body = next(made)
        answer = page.client.request(method, ADDRESS + path, headers=headers, content=body)
        assert answer.status_code in ALLOWED, (method, path, headers, answer.status_code, answer.text)


def test_odd_requests_are_refused(run: Path) -> None:
    fuzz(run, 0, 400)


@pytest.mark.long
def test_ten_thousand_odd_requests_are_refused(run: Path) -> None:
    fuzz(run, 1, 10_000)
