"""`rlhf export --push` against a local server that speaks the hub's API, and what is pulled from it."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from huggingface_hub import snapshot_download
from rlhf_reward import RewardConfig
from rlhf_tools import commands

from rlhf_core import InputError, load_model


class Hub:
    """Model repositories: {name: {"private", "branches": {branch: {path: content}}}}, and large files by sha256."""

    def __init__(self) -> None:
        self.models: dict[str, Any] = {}
        self.large: dict[str, bytes] = {}
        self.commits: list[tuple[str, str]] = []


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

    def refuse(self, status: int, why: str) -> None:
        self.answer(
            {"error": why}, status, X_Error_Message=why, X_Error_Code="RepoNotFound" if status == 404 else ""
        )

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
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            name, rest = "/".join(parts[2:4]), parts[4:]
            if name not in self.hub.models:
                return self.refuse(404, "Repository not found")
            model = self.hub.models[name]
            branch = rest[1] if len(rest) > 1 else "main"
            files = self.files(name, branch)
            listed = [{"type": "file", "path": p, "oid": "0", "size": len(c)} for p, c in files.items()]
            if rest[:1] == ["tree"]:
                return self.answer(listed)
            siblings = [{"rfilename": p} for p in files]
            return self.answer(
                {"id": name, "private": model["private"], "sha": self.commit(branch), "siblings": siblings}
            )
        owner, name, _, revision, *rest = parts
        content = self.files(f"{owner}/{name}", revision)["/".join(rest)]
        tag = f'"{hashlib.sha256(content).hexdigest()}"'
        return self.answer(content, ETag=tag, X_Repo_Commit=self.commit(revision))

    do_HEAD = do_GET  # noqa: N815

    def files(self, name: str, revision: str) -> dict[str, bytes]:
        """Return the files of a branch, or of the commit that stands for one."""
        branches = self.hub.models[name]["branches"]
        return next(files for branch, files in branches.items() if revision in (branch, self.commit(branch)))

    def commit(self, revision: str) -> str:
        """Return the commit that stands for a branch; a commit is its own."""
        return revision if len(revision) == 40 else hashlib.sha1(revision.encode()).hexdigest()

    def address(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/{name}"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[Hub, str]]:
    """A hub, and its address, which huggingface_hub uses."""
    handler = type("Handler", (Handler,), {"hub": Hub()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    template = "{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", f"{address}/{template}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
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
    commands.export(
        str(tmp_path / "MODEL"), tmp_path / "out", push="me/orders", private=True, revision="first"
    )
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
    commands.export(str(tmp_path / "MODEL"), push="me/orders", revision="first")
    assert set(pushed) == {*written, "notes.md"}
    model["private"] = False
    with pytest.raises(InputError, match="me/orders is public on the hub"):
        commands.export(str(tmp_path / "MODEL"), push="me/orders", private=True)
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(InputError, match=r"the hub refuses it .*hf auth login"):
        commands.export(str(tmp_path / "MODEL"), push="me/orders")


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
    commands.export(str(artifact.path), push="me/judge")
    card = there.models["me/judge"]["branches"]["main"]["README.md"].decode()
    assert card.startswith('---\nlibrary_name: "transformers"\npipeline_tag: "text-classification"\n')
    assert 'AutoModelForSequenceClassification.from_pretrained("me/judge")' in card
    assert str(tmp_path) not in card


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "give DIR, a new directory, or --push"),
        ({"directory": Path("x"), "private": True}, "need --push"),
    ],
)
def test_flags_that_do_not_fit(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        commands.export("MODEL", **given)
