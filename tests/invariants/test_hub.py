"""The hub, against a local server that speaks its API: `rlhf export --push`, and hf:// names of models and data."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote

import pytest
from huggingface_hub import snapshot_download
from rlhf_reward import RewardConfig
from rlhf_sft import SFTConfig, SFTTrainer

from rlhf_core import InputError, RunError, load_model, plugins, run_pipeline
from rlhf_core.data import load
from rlhf_core.data.streams import open_streams
from rlhf_core.hub import parse
from rlhf_core.tokenizer import load_tokenizer
from tests.shared import commands
from tests.shared.plans import forecast_of, plan_of

export = partial(commands.rlhf, "export")


class Hub:
    """Repositories: {name: {"private", "branches": {branch: {path: content}}}}, and large files by sha256.

    Datasets are repositories whose name begins with datasets/. kept: the files of every commit that was asked for.
    """

    def __init__(self) -> None:
        self.models: dict[str, Any] = {}
        self.kept: dict[str, dict[str, bytes]] = {}
        self.large: dict[str, bytes] = {}
        self.commits: list[tuple[str, str]] = []
        self.asked: list[str] = []


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, content: Any, status: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, why: str, code: str = "RepoNotFound") -> None:
        code = code if status == 404 else ""
        self.answer({"error": why}, status, X_Error_Message=why, X_Error_Code=code)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_POST(self) -> None:
        content, (path, _, _) = self.body(), self.path.partition("?")
        if self.headers.get("Authorization") != "Bearer hf_test" and not path.endswith("objects/batch"):
            return self.refuse(401, "Invalid credentials in Authorization header")
        if path == "/api/repos/create":
            given = json.loads(content)
            name = f"{given.get('organization') or 'me'}/{given['name']}"
            if name in self.hub.models:
                return self.answer({"url": self.address(name)}, 409)
            private = bool(given.get("private") or given.get("visibility") == "private")
            self.hub.models[name] = {"private": private, "branches": {"main": {}}}
            return self.answer({"url": self.address(name), "name": name, "private": private})
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**each, "actions": {"upload": {"href": f"{self.address('')}upload/{each['oid']}"}}}
                for each in json.loads(content)["objects"]
            ]
            return self.answer({"transfer": "basic", "objects": objects})
        _, _, _, owner, name, verb, branch = path.split("/", 6)
        branches = self.hub.models[f"{owner}/{name}"]["branches"]
        if verb == "branch":
            branches.setdefault(branch, {})
            return self.answer({})
        if verb == "preupload":
            files = json.loads(content)["files"]
            modes = [
                {"path": f["path"], "uploadMode": "lfs" if "safetensors" in f["path"] else "regular"}
                for f in files
            ]
            return self.answer({"files": [{**mode, "shouldIgnore": False} for mode in modes]})
        assert verb == "commit", path
        files = branches[branch]
        for line in map(json.loads, content.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        self.hub.commits.append((f"{owner}/{name}", branch))
        oid = hashlib.sha1(repr(sorted(files)).encode()).hexdigest()
        return self.answer({"commitOid": oid, "commitUrl": f"{self.address(f'{owner}/{name}')}/commit/{oid}"})

    def do_PUT(self) -> None:
        content = self.body()
        oid = self.path.rpartition("/")[2]
        assert hashlib.sha256(content).hexdigest() == oid
        self.hub.large[oid] = content
        self.answer({})

    def do_GET(self) -> None:
        path, _, _ = self.path.partition("?")
        self.hub.asked.append(path)
        parts = list(map(unquote, path.strip("/").split("/")))
        if parts[0] == "api":
            prefix = "datasets/" if parts[1] == "datasets" else ""
            name, rest = prefix + "/".join(parts[2:4]), parts[4:]
            if name not in self.hub.models:
                return self.refuse(404, "Repository not found")
            model = self.hub.models[name]
            branch = rest[1] if len(rest) > 1 else "main"
            if branch not in {*model["branches"], *self.hub.kept}:
                return self.refuse(404, "Revision not found", "RevisionNotFound")
            files = self.files(name, branch)
            listed = [{"type": "file", "path": p, "oid": "0", "size": len(c)} for p, c in files.items()]
            if rest[:1] == ["tree"]:
                return self.answer(listed)
            siblings = [{"rfilename": p} for p in files]
            return self.answer(
                {
                    "id": name,
                    "private": model["private"],
                    "sha": self.commit(name, branch),
                    "siblings": siblings,
                }
            )
        of = parts.index("resolve")
        name, revision, file = "/".join(parts[:of]), parts[of + 1], "/".join(parts[of + 2 :])
        if (content := self.files(name, revision).get(file)) is None:
            return self.refuse(404, "Entry not found", "EntryNotFound")
        tag = f'"{hashlib.sha256(content).hexdigest()}"'
        return self.answer(content, ETag=tag, X_Repo_Commit=self.commit(name, revision))

    do_HEAD = do_GET  # noqa: N815

    def files(self, name: str, revision: str) -> dict[str, bytes]:
        return self.hub.kept.get(revision) or self.hub.models[name]["branches"][revision]

    def commit(self, name: str, revision: str) -> str:
        """Return the commit of what a branch has now; a commit is its own."""
        if revision in self.hub.kept:
            return revision
        files = self.files(name, revision)
        commit = hashlib.sha1(repr((name, sorted(files.items()))).encode()).hexdigest()
        self.hub.kept[commit] = dict(files)
        return commit

    def address(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/{name}"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[Hub, str]]:
    """A hub, and its address, which huggingface_hub uses."""
    handler = type("Handler", (Handler,), {"hub": Hub()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    template = "{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", f"{address}/{template}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    yield handler.hub, address  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_pushed_model_is_pulled_byte_by_byte(
    hub: tuple[Hub, str], tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, address = hub
    tiny.make_model().save(tmp_path / "MODEL")
    export(tmp_path / "MODEL", tmp_path / "out", "--push", "me/orders", "--private", "--revision", "first")
    model = there.models["me/orders"]
    assert (model["private"], there.commits) == (True, [("me/orders", "first")])
    written = {
        p.relative_to(tmp_path / "out").as_posix(): p.read_bytes() for p in (tmp_path / "out").rglob("*")
    }
    pushed = model["branches"]["first"]
    assert pushed == written
    assert "model.safetensors" in pushed
    assert b'AutoModelForCausalLM.from_pretrained("me/orders")' in pushed["README.md"]
    pulled = Path(
        snapshot_download(
            "me/orders", revision="first", endpoint=address, cache_dir=tmp_path / "cache", token="hf_test"
        )
    )
    assert {p.relative_to(pulled).as_posix(): p.read_bytes() for p in pulled.rglob("*")} == written
    assert load_model(pulled).hf_config == load_model(tmp_path / "MODEL").hf_config
    # The weights of an earlier push go, other files stay; and what is public is not made private in silence.
    pushed |= {"model-00001-of-00002.safetensors": b"old", "notes.md": b"mine"}
    export(tmp_path / "MODEL", "--push", "me/orders", "--revision", "first")
    assert set(pushed) == {*written, "notes.md"}
    model["private"] = False
    with pytest.raises(InputError, match="me/orders is public on the hub"):
        export(tmp_path / "MODEL", "--push", "me/orders", "--private")
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(InputError, match=r"the hub refuses it .*hf auth login"):
        export(tmp_path / "MODEL", "--push", "me/orders")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(
        RunError, match=r"--push me/orders: the upload failed: .*refused; nothing here is lost"
    ):
        export(tmp_path / "MODEL", "--push", "me/orders")


@pytest.mark.long
def test_the_card_of_a_reward_model(hub: tuple[Hub, str], tiny: ModuleType, tmp_path: Path) -> None:
    there, _ = hub
    tiny.make_model().save(tmp_path / "MODEL")
    config = RewardConfig(max_training_steps=1, total_batch_size=4)
    artifact = tiny.run(
        "reward",
        config,
        tmp_path / "run/reward",
        model=str(tmp_path / "MODEL"),
        train_dataset=tiny.pairs(8),
        eval_dataset=tiny.pairs(8, seed=1),
    )
    export(artifact.path, "--push", "me/judge")
    card = there.models["me/judge"]["branches"]["main"]["README.md"].decode()
    assert card.startswith('---\nlibrary_name: "transformers"\npipeline_tag: "text-classification"\n')
    assert 'AutoModelForSequenceClassification.from_pretrained("me/judge")' in card
    assert str(tmp_path) not in card


PIPELINE = """
dir = "runs/hub"

[[stage]]
name = "policy"
trainer = "sft"
model = "hf://me/orders"
train_data = [{ path = "hf://datasets/me/texts@v1/parts/train.jsonl" }]
total_batch_size = 4
max_training_steps = 1
lora = { rank = 2 }
"""


def put(hub: Hub, name: str, files: dict[str, bytes], branch: str = "main") -> None:
    hub.models.setdefault(name, {"private": False, "branches": {}})["branches"][branch] = files


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def rows(*words: str) -> bytes:
    return "".join(json.dumps({"prompt": "a b", "completion": f" {word}"}) + "\n" for word in words).encode()


def test_a_run_keeps_to_the_commits_that_it_began_with(
    hub: tuple[Hub, str],
    tiny: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
) -> None:
    there, _ = hub
    monkeypatch.chdir(tmp_path)
    tiny.make_model(seed=1).save("first")
    tiny.make_model(seed=2).save("second")
    put(there, "me/orders", files_of(Path("first")))
    put(there, "datasets/me/texts", {"parts/train.jsonl": rows(*"cdef"), "README.md": b"big"}, "v1")
    Path("pipeline.toml").write_text(PIPELINE)
    # What is checked needs no weights.
    forecast = forecast_of("pipeline.toml", plugins.load())["policy"]
    assert forecast.memory
    assert not any("safetensors" in path for path in there.asked)
    run_pipeline("pipeline.toml")
    record = json.loads(Path("runs/hub/policy/stage.json").read_text())
    model, data = (
        record["hub"]["hf://me/orders"],
        record["hub"]["hf://datasets/me/texts@v1/parts/train.jsonl"],
    )
    commit = model.removeprefix("hf://me/orders@")
    assert there.kept[commit] == files_of(Path("first"))
    assert (record["config"]["model"], record["config"]["train_data"]) == (model, [{"path": data}])
    adapter = json.loads(Path("runs/hub/policy/artifacts/model/adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == ("me/orders", commit)
    assert not any("README" in path for path in there.asked)
    # The branch moves: the run goes on with what it has, and says so.
    put(there, "me/orders", files_of(Path("second")))
    run_pipeline("pipeline.toml", sets=["policy.max_training_steps=2"])
    (said,) = [str(each.message) for each in recwarn if "hf://" in str(each.message)]
    assert re.match(rf"hf://me/orders is at commit \w+ now; the run keeps to {commit[:12]}", said)
    assert json.loads(Path("runs/hub/policy/stage.json").read_text())["hub"] == record["hub"]
    # Another revision is another experiment; the same commit by its own name is not, also without the hub.
    with pytest.raises(
        InputError, match=rf"stage 'policy'\.model: then \"{model}\", now \"hf://me/orders@\w+\""
    ):
        run_pipeline(
            "pipeline.toml", sets=["policy.model=hf://me/orders@main", "policy.max_training_steps=2"]
        )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = run_pipeline("pipeline.toml", sets=[f"policy.model={model}", "policy.max_training_steps=2"])
    assert result.stages["policy"].skipped
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    export("runs/hub/policy/artifacts/model", "--push", "me/policy")
    card = there.models["me/policy"]["branches"]["main"]["README.md"].decode()
    assert 'base_model: "me/orders"' in card
    assert data in card


@pytest.mark.long
def test_trainers_from_python_keep_to_commits(
    hub: tuple[Hub, str], tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, _ = hub
    monkeypatch.chdir(tmp_path)
    tiny.make_model().save("model")
    put(there, "me/orders", files_of(Path("model")))
    put(there, "datasets/me/texts", {"train.jsonl": rows(*"cdef")})
    for updates in (1, 2):
        config = SFTConfig(
            model="hf://me/orders", total_batch_size=4, max_training_steps=updates, save_directory="run"
        )
        SFTTrainer(config, train_dataset="hf://datasets/me/texts/train.jsonl").train()
        record = json.loads(Path("run/stage.json").read_text())
        pinned = record["hub"]["hf://me/orders"]
        assert there.kept[pinned.partition("@")[2]] == files_of(Path("model"))
        assert record["config"]["model"] == pinned
        assert record["config"]["train_data"] == record["hub"]["hf://datasets/me/texts/train.jsonl"]
        put(there, "me/orders", {})  # has moved


def test_names_of_the_hub_in_python(hub: tuple[Hub, str], tiny: ModuleType, tmp_path: Path) -> None:
    there, _ = hub
    tiny.make_model().save(tmp_path / "MODEL")
    put(there, "me/orders", files_of(tmp_path / "MODEL"), "new/branch")
    put(there, "datasets/me/texts", {"a.jsonl": rows(*"cd")})
    assert load_model("hf://me/orders@new%2Fbranch").hf_config == load_model(tmp_path / "MODEL").hf_config
    assert len(load_tokenizer("hf://me/orders@new%2Fbranch")) == len(tiny.make_tokenizer())
    assert load_model("hf://models/me/orders@new%2Fbranch/").hf_config["hidden_size"] == 16
    put(there, "datasets/me/texts", {"parts/b.jsonl": rows("e")}, "refs/pr/3")
    assert [row["completion"] for row in load("hf://datasets/me/texts@refs/pr/3/parts/b.jsonl")] == [" e"]
    whole = load({"name": "jsonl", "path": "hf://datasets/me/texts/a.jsonl", "split": "train[:1]"})
    assert [row["completion"] for row in whole] == [" c"]
    (stream,) = open_streams({"path": "hf://datasets/me/texts@main/a.jsonl", "streaming": True})
    assert [row["completion"] for (_, row), _ in stream.start({})] == [" c", " d"]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: load_model("me/nothing"),
            "me/nothing: no such directory, and hf://me/nothing: the hub has no",
        ),
        (lambda: load_model("hf://me/nothing"), "hf://me/nothing: the hub has no such repository"),
        (
            lambda: load_model("hf://orders"),
            "hf://orders is not a name of the hub: write hf://OWNER/NAME@REV",
        ),
        (lambda: load_model("hf://me/orders@v2", revision="v3"), "its revision is a part of the name"),
        (lambda: load("hf://me/orders"), "is a model; a dataset is named hf://datasets/me/orders"),
        (lambda: load("hf://datasets/me/texts/b.jsonl"), "texts/b.jsonl: the repository has no such file"),
        (
            lambda: plan_of("p.toml", plugins.load()),
            r"stage 's'\.model: hf://me/orders@v9: the repository has no such revision",
        ),
    ],
)
def test_names_that_the_hub_does_not_have(
    hub: tuple[Hub, str], call: Callable[[], Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.toml").write_text(
        'dir = "r"\n[[stage]]\nname = "s"\ntrainer = "sft"\nmodel = "hf://me/orders@v9"\n'
    )
    put(hub[0], "me/orders", {"config.json": b"{}"})
    put(hub[0], "datasets/me/texts", {"a.jsonl": rows("c")})
    with pytest.raises(InputError, match=said):
        call()


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("hf://me/x", ("me/x", "model", None, None)),
        ("hf://models/me/x@v1.0/", ("me/x", "model", "v1.0", None)),
        ("hf://datasets/me/x@refs/pr/3/a/b.jsonl", ("me/x", "dataset", "refs/pr/3", "a/b.jsonl")),
        ("hf://datasets/me/x@a%2Fb/c.jsonl", ("me/x", "dataset", "a/b", "c.jsonl")),
    ],
)
def test_parts_of_a_name(name: str, parts: tuple[str, ...]) -> None:
    assert parse(name) == parts
    assert parse(str(parse(name))) == parts
