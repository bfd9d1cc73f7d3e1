"""Requests for the server of a run's page, most of which are nearly right, and what it may answer."""

from __future__ import annotations

import random
from collections.abc import Iterator

ALLOWED = {200, 304, 400, 401, 404, 405, 413, 431}
PARTS = (
    *("api", "runs", "compare", "key", "static", "policy", "rm", "rollouts", "rows", "metrics", "events"),
    *("evaluations", "completions", "main.js", "..", "%2e%2e", "%00", "%ff", "0", "-1", "é", ""),
    *("1" * 30, "a" * 3000),
)
NAMES = (
    *("update", "sort", "search", "least", "most", "where", "without"),
    *("finish", "offset", "limit", "after", "names", "runs"),
)
VALUES = (
    *("1", "2", "-1", "0", "nan", "inf", "1e999", "", "reward", "-reward", "judge", "%", "%00", "%ff", "'"),
    *('"', "\ud800".encode("utf-8", "replace").decode(), "9" * 20, "a,b", "٣"),
)
ROUTES = ("metrics", "rollouts", "rows", "evaluations", "evaluations/1", "rollouts/1/completions/1")
METHODS = ("GET", "GET", "GET", "GET", "GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "BREW")


def requests(seed: object, id: str) -> Iterator[tuple[str, str, dict[str, str], bytes]]:
    """Yield methods, addresses, headers and bodies, most of which are nearly right."""
    rng = random.Random(str(seed))
    routes = ["runs", f"runs/{id}", f"runs/{id}/events", "compare", "key"]
    routes += [f"runs/{id}/policy/{route}" for route in ROUTES]
    while True:
        path = (
            f"/api/{rng.choice(routes)}"
            if rng.random() < 0.6
            else "/" + "/".join(rng.choices(PARTS, k=rng.randint(0, 6)))
        )
        query = "&".join(f"{rng.choice(NAMES)}={rng.choice((*VALUES, id))}" for _ in range(rng.randint(0, 4)))
        headers = {"If-None-Match": rng.choice(['"x"', "*", "W/", ","])} if rng.random() < 0.2 else {}
        if rng.random() < 0.05:
            headers["Host"] = rng.choice(["evil", "127.0.0.1:x", "[::1]"])
        body = rng.choice([b"", b"{", b'{"key": 1}', b"x" * 5000]) if rng.random() < 0.3 else b""
        yield rng.choice(METHODS), f"{path}?{query}" if query else path, headers, body
