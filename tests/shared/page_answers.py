"""Answers for the page of a run, and a server of them: two runs, of which one goes on."""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import numpy as np
from rlhf_report.frozen import PAGE

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript",
    "css": "text/css",
    "svg": "image/svg+xml",
}
BEGAN = 1.8e9
UPDATES = 60


def float32(value: float) -> float:
    return float(np.float32(value))


def metrics(updates: int = UPDATES, shift: float = 0.0) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl of a policy, whose reward has a kink at update 40."""
    return [
        {
            "step": step,
            "time": BEGAN + 2 * step,
            "num_tokens": 400 * step,
            **dict.fromkeys(
                ("reward", "rewards/model/mean"), float32(math.sin(step / 20) + shift - (step > 40))
            ),
            "zero": 0.0,
            "kl": float32(2e-4 + step / 1e6),
            "loss": None if step == 33 else float32(0.1 / step),
            "grad_norm": float32(1 / step),
            **({"eval_reward": float32(shift)} if step % 20 == 0 else {}),
        }
        for step in range(1, updates + 1)
    ]


def groups(update: int, text: str) -> list[dict[str, Any]]:
    """Two groups of completions, one of which has seven equal ones."""
    long = "word " * 30
    return [
        {
            "row": 5 + row,
            "prompt": f"Prompt {row}: {text}",
            "previous": update - 1 if update > 39 else None,
            "next": update + 1 if update < 41 else None,
            "mean": float32(0.3 + row),
            "spread": float32(0.2 * row),
            "update": update,
            "rollout": update,
            "completions": [
                {
                    "index": 8 * row,
                    "indices": list(range(8 * row, 8 * row + 7)),
                    "copies": 7,
                    "text": f"A reply of update {update}. {text}",
                    "reward": float32(0.1 + row),
                    "rewards": {"model": float32(0.1 + row), "brevity": None},
                    "advantage": float32(-0.3),
                    "length": 4,
                    "finish": "stop",
                    "version": update - 1,
                    "age": 1,
                },
                {
                    "index": 8 * row + 7,
                    "indices": [8 * row + 7],
                    "copies": 1,
                    "text": long,
                    "reward": float32(2.1 - row),
                    "rewards": {"model": float32(2.1), "brevity": float32(-0.7)},
                    "advantage": float32(2.1),
                    "length": 150,
                    "finish": "length",
                    "version": update,
                    "age": 0,
                },
            ],
        }
        for row in range(2)
    ]


def picture(text: str) -> dict[str, Any]:
    """Two stages with an arrow between them."""
    box = {"y": 1, "trainer": "grpo", "state": "done", "lines": [f"pairs.jsonl {text}"]}
    return {
        "width": 510,
        "height": 98,
        "boxes": [{"x": 1, "name": "rm", **box}, {"x": 301, "name": "policy", **box}],
        "arrows": [{"path": "M209 49H299", "label": f"reward {text}", "x": 255, "y": 41}],
    }


def results(text: str) -> dict[str, Any]:
    """What a stage came to: a histogram, completions of an episode before and after, a pair."""
    said = {
        "role": "assistant",
        "policy": True,
        "turn": 1,
        "tokens": 5,
        "reward": 0.5,
        "errors": [f"no {text}"],
    }
    before = {
        "text": f"first {text}",
        "reward": 0.5,
        "rewards": {"model": 0.5, "brevity": None},
        "length": 4,
        "finish": "stop",
        "copies": 3,
    }
    after = before | {
        "text": f"then {text}",
        "messages": [said | {"content": f"then {text}"}],
        "dropped": f"failed {text}",
    }
    side = {"prompt": f"Asked {text}", "asked": None, "columns": {f"answer {text}": f"42 {text}"}}
    completions = {
        "title": "Completions",
        "updates": [0, 60],
        "same_prompts": True,
        "group": 4,
        "means": [{"name": f"reward {text}", "before": 0.5, "after": 1.5}],
        "sides": [
            side | {"before": before, "after": after, "means": [0.5, 1.5]},
            side | {"before": before, "after": before, "means": [0.5, 0.5]},
        ],
    }
    numbers = {"first": 0.5, "last": 1.5, "least": 0.25, "largest": 2.5, "count": 60, "missing": 1}
    pair = {part: f"{part} {text}" for part in ("row", "prompt", "chosen", "rejected")}
    line = {"x": [0.5, 1.5], "y": [25.0, 75.0]}
    return {
        "metrics": [{"name": name, "saved": 1.0, **numbers} for name in ("reward", "kl", "memory/peak")],
        "charts": [
            {
                "group": "Distributions",
                "title": f"Rewards {text}",
                "axis": "reward",
                "bars": True,
                "lines": [{"name": f"update 1 {text}", **line}, {"name": "update 60", **line}],
            }
        ],
        "completions": [completions],
        "pairs": [pair | {"scores": [{"update": 60, "chosen": 1.5, "rejected": -0.5}]}],
        "problems": [f"weights.jsonl {text}"],
    }


def tokens(text: str) -> dict[str, Any]:
    """Return a completion's tokens: the loss does not see the second, and one log-probability is not known."""
    logps = [float32(math.log(p)) for p in (0.9, 0.5, 0.01, 0.3)]
    return {
        "index": 0,
        "ids": [7, 8, 9, 2],
        "texts": [" A", "\n", text, "<eos>"],
        "mask": [1, 0, 1, 1],
        "sampler_logps": logps,
        "trainer_logps": [None, *(float32(each + 1e-3) for each in logps[1:])],
        "entropies": None,
        "advantages": [float32(-0.3)] * 4,
        "versions": [39, 39, 39, 39],
    }


def answers(text: str = "<b>bold</b>", *, updates: int = UPDATES) -> dict[str, Any]:
    """Return {route: answer}; `text` is in every field that a file of a run may fill."""
    charts = [
        {"group": "Loss and gradient", "title": "Loss", "names": ["loss"], "log": False, "unit": 1},
        {
            "group": "Loss and gradient",
            "title": "Gradient norm",
            "names": ["grad_norm"],
            "log": True,
            "unit": 1,
        },
        {"group": "Reward", "title": "Reward", "names": ["reward", "rewards/model/mean", "eval_reward"]}
        | {"log": False, "unit": 1},
        {"group": "Other", "title": "Zero", "names": ["zero"], "log": False, "unit": 1},
        {"group": "Clip and KL", "title": f"KL {text}", "names": ["kl"], "log": False, "unit": 1},
    ]
    names = ["loss", "grad_norm", "reward", "rewards/model/mean", "eval_reward", "kl", "zero"]
    see = {"kind": "update", "update": 44, "query": {"sort": "-spread"}}
    policy = {
        "name": "policy",
        "trainer": "grpo",
        "state": "running",
        "message": "",
        "update": updates,
        "updates": 100,
        "saved": 40,
        "seconds_left": 80,
        "verdict": [
            {
                "text": f"The reward rose by 0.4 (0.3 to 0.5) on 128 held-out prompts. {text}",
                "tone": "",
                "see": None,
            },
            {"text": f"Longer is better. {text}", "tone": "warning", "see": see},
        ],
        "checked": [f"All values are finite. {text}"],
        "key": ["loss", "reward", "kl"],
        "metrics": names,
        "charts": charts,
        "time": [{"name": "before the first update", "seconds": 4.0}, {"name": "updates", "seconds": 120.0}],
        "subsets": None,
        "rollouts": [39, 40, 41],
        "rows": [],
        "evaluations": [],
        "facts": [f"24,000 tokens {text}"],
        "next": f"rlhf run {text}",
    }
    rm = {
        **policy,
        "name": "rm",
        "trainer": "reward",
        "state": "done",
        "update": 4,
        "updates": 4,
        "saved": None,
        "seconds_left": None,
        "subsets": {"columns": ["annotator", "accuracy"], "rows": [[f"ann {text}", 0.75]]},
        "rollouts": [],
        "rows": [2, 4],
        "evaluations": [2, 4],
    }
    events = [
        {"time": BEGAN, "stage": "policy", "event": "begun"},
        {
            "time": BEGAN + 61,
            "stage": "policy",
            "event": "warning",
            "message": f"The lengths run away. {text}",
        },
    ]
    run = {
        "name": f"first {text}",
        "dir": f"runs/first {text}",
        "state": "running",
        "error": None,
        "machine": "1 × cpu",
        "seconds": 124.0,
        "config": f"seed = 0\n# {text}",
        "seed": 7,
        "began": BEGAN,
        "versions": f"rlhf-core {text}",
        "picture": picture(text),
        "events": events,
        "problems": [f"samples/x: {text}"],
        "stages": [rm, policy],
    }
    listed = {
        "stage": "policy",
        "trainer": "grpo",
        "update": updates,
        "updates": 100,
        "seconds_left": 80,
        "changed": BEGAN + 2 * updates,
        "metrics": {"reward": metrics(updates)[-1]["reward"], f"kl {text}": float32(0.06)},
        "spark": {"name": "reward", "values": [row["reward"] for row in metrics(updates)]},
        "warnings": [f"The lengths run away. {text}"],
        "alarm": f"Longer is better. {text}",
    }
    rows = [
        {"row": i, "where": f"pairs.jsonl row {i} {text}", "text": f"Question {i} {text}", "change": 0.5 - i}
        for i in range(3)
    ]
    found: dict[str, Any] = {
        "api/runs": {
            "problems": [f"/data: Permission denied {text}"],
            "runs": [
                {"id": "a", **{name: run[name] for name in ("name", "dir", "state", "error")}, **listed},
                {"id": "b", "name": "second", "dir": "runs/second", **listed, "state": "failed"}
                | {"error": f"the loss is not finite {text}", "warnings": []},
            ],
        },
        "api/runs/a": {"id": "a", **run},
        "api/runs/b": {"id": "b", **run, "name": "second", "dir": "runs/second"},
        "api/runs/a/policy/metrics": {"rows": metrics(updates)},
        "api/runs/b/policy/metrics": {"rows": metrics(updates, shift=0.5)},
        "api/runs/a/rm/metrics": {"rows": metrics(4)},
        "api/runs/a/policy/results": results(text),
        "api/runs/a/rm/results": results(text) | {"completions": [], "charts": []},
        "api/runs/a/rm/evaluations": {
            "evaluations": [{"update": update, "metrics": {"eval_accuracy": 0.75}} for update in (2, 4)]
        },
        "api/runs/a/rm/evaluations/2": {
            "before": None,
            "of": "chosen",
            "falls": False,
            "update": 2,
            "rows": [row | {"values": {"chosen": 0.5}, "change": None} for row in rows],
        },
        "api/runs/a/rm/evaluations/4": {
            "before": 2,
            "of": "chosen",
            "falls": False,
            "update": 4,
            "rows": [
                row | {"values": {"chosen": float32(1 / 3)}, "leak": f"x.jsonl row 7 {text}"} for row in rows
            ],
        },
        "api/compare?runs=a%2Cb": {
            "runs": [
                {"id": "a", "name": f"first {text}", "dir": "runs/first", "state": "running"}
                | {"seconds": 60.0},
                {"id": "b", "name": "second", "dir": "runs/second", "state": "failed", "seconds": 60.0},
            ],
            "stages": [
                {
                    "name": "policy",
                    "metrics": names,
                    "key": ["loss", "reward", "kl"],
                    "charts": charts,
                    "saved": [40, None],
                    "last": [{"name": "reward", "values": [float32(1 / 3), None]}],
                    "differences": [{"name": "learning_rate", "values": ["0.001", f"0.01 {text}"]}],
                    "prompts": [
                        {
                            "row": 5,
                            "prompt": f"Prompt {text}",
                            "completions": [{"text": f"reply {text}", "reward": 0.5, "update": 40}, None],
                        }
                    ],
                }
            ],
        },
    }
    for update in (39, 40, 41):
        address = "api/runs/a/policy/rollouts"
        found[f"{address}?update={update}"] = {
            "rollout": update,
            "update": update,
            "total": 2,
            "finishes": ["length", "stop"],
            "rewards": ["model", "brevity"],
            "groups": groups(update, text),
        }
        found[f"{address}/{update}/completions/0"] = tokens(text)
    for update in (2, 4):
        found[f"api/runs/a/rm/rows?update={update}"] = {
            "update": update,
            "total": 3,
            "rows": [
                row | {"loss": float32(1 / 3), "scores": {"margin": 2.0}, "change": None} for row in rows
            ],
        }
    return found


@contextmanager
def serve(found: dict[str, Any], *, key: str = "") -> Iterator[str]:
    """Serve the page and the answers, of which every request gets the newest; yield the page's address.

    key: what must be given before any answer.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            address = urlsplit(self.path)
            status, kind, body = 200, "application/json", b""
            if address.path.startswith("/api/") and key and self.headers.get("Cookie") != "key=given":
                status = 401
            elif address.path.startswith("/api/"):
                status, body = answer(address.path[1:], parse_qs(address.query))
            else:
                name = address.path.removeprefix("/static/").strip("/") or "index.html"
                kind = TYPES[name.rpartition(".")[2]]
                body = (PAGE / name).read_bytes()
            tag = f'"{hashlib.sha256(body).hexdigest()}"'
            if status == 200 and self.headers.get("If-None-Match") == tag:
                status, body = 304, b""
            self.send_response(status)
            for name, value in {"ETag": tag, "Content-Type": kind, "Content-Security-Policy": POLICY}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200 if self.path == "/api/key" and given == {"key": key} else 401)
            if given == {"key": key}:
                self.send_header("Set-Cookie", "key=given; HttpOnly; SameSite=Strict; Path=/")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    def answer(path: str, query: dict[str, list[str]]) -> tuple[int, bytes]:
        kept = {name: values[0] for name, values in query.items() if name in ("update", "runs")}
        found_answer = found.get(f"{path}?{urlencode(kept)}" if kept else path)
        if found_answer is None:
            return 404, json.dumps({"error": {"message": f"nothing is at {path}"}}).encode()
        if path.endswith("/metrics") and "after" in query:
            after = int(query["after"][0])
            found_answer = {"rows": [row for row in found_answer["rows"] if row["step"] > after]}
        return 200, json.dumps(found_answer).encode()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
