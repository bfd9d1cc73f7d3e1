"""The page of `rlhf watch` as one file: its scripts joined, and the answers of its routes inside."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "page"
IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class) (\w+))", re.MULTILINE)
CONTENT = re.compile(r"<(style|script)[^>]*>(.*?)</\1>", re.DOTALL)


def frozen(answers: Mapping[str, Any], title: str) -> str:
    """Return the page with the answers of its routes in it, which opens from a disk and asks for nothing.

    answers: {route: JSON}, as `api/runs`, `api/runs/ID`, `api/runs/ID/STAGE/metrics`; of a query, `update` and `runs`
    alone count: `api/runs/ID/STAGE/rollouts?update=7`.
    """
    style = f"<style>{_read('style.css')}</style>"
    script = f'<script type="module">{joined("main")}</script>'
    data = json.dumps(answers, separators=(",", ":"), allow_nan=False)
    packed = base64.b64encode(gzip.compress(data.encode(), 9, mtime=0)).decode("ascii")
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'"
    page = _read("index.html")
    page = re.sub(r'<link rel="(?:icon|stylesheet)"[^>]*>\n', "", page)
    page = page.replace('<script type="module" src="static/main.js"></script>\n', "")
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n{style}\n'
    body = f'<script type="text/plain" id="frozen">{packed}</script>\n{script}\n'
    page = page.replace("<title>rlhf watch</title>", f"<title>{_escaped(title)} · rlhf</title>")
    return page.replace("</head>", f"{head}</head>").replace("</body>", f"{body}</body>")


def joined(name: str) -> str:
    """Return a module of the page with all that it imports before it, as one module.

    Each is a function whose value has what it exports.
    """
    parts: dict[str, str] = {}
    _collect(name, parts)
    return "\n".join(parts.values())


def _collect(name: str, parts: dict[str, str]) -> None:
    """Add a module to the parts, after those that it imports."""
    text = _read(f"{name}.js")
    for _, other in IMPORT.findall(text):
        if other not in parts:
            _collect(other, parts)
    body = EXPORT.sub("", IMPORT.sub(r"const \1 = from_\2;", text))
    parts[name] = (
        f"const from_{name} = (() => {{\n{body}\nreturn {{ {', '.join(EXPORT.findall(text))} }};\n}})();"
    )


def _hash(element: str) -> str:
    match = CONTENT.fullmatch(element)
    assert match is not None
    digest = hashlib.sha256(match[2].encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _read(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")
