"""Open a page in Chromium, without a window, and see whether it runs scripts of a text or asks for anything."""

from __future__ import annotations

import http.server
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path

from tests.torture.experiment import Skipped

CANARY = "rlhf-torture.invalid"
"""The host that texts ask for; the proxy, which Chromium is told to use for everything, hears of it."""
HTML = {
    "script": f"<script>document.title='owned';fetch('http://{CANARY}/script')</script>",
    "end of script": f"</script><script>document.title='owned';new Image().src='http://{CANARY}/end'</script>",
    "end of title": f"</title></style></textarea><script>document.title='owned'</script><img src=http://{CANARY}/t>",
    "image": f"<img src=http://{CANARY}/image onerror=document.title='owned'>",
    "quote": f"\"'><img src=x onerror=document.title='owned'><link rel=stylesheet href=http://{CANARY}/css>",
    "attribute": '" onmouseover="document.title=\'owned\'" autofocus onfocus="document.title=\'owned\'" x="',
    "svg": f"<svg onload=document.title='owned'><image href=http://{CANARY}/svg /></svg>",
    "meta": f"<meta http-equiv=refresh content='0;url=http://{CANARY}/meta'><base href=http://{CANARY}/>",
    "frame": f"<iframe src=http://{CANARY}/frame srcdoc='<script>top.document.title=1</script>'></iframe>",
    "link": "<a href=\"javascript:document.title='owned'\">x</a> javascript:document.title='owned'",
    "style": f"<style>@import url(http://{CANARY}/import);*{{background:url(http://{CANARY}/style)}}</style>",
    "css": f"red;background:url(http://{CANARY}/css)",
    "form": f"<form action=http://{CANARY}/form><button autofocus onfocus=document.title='owned'>",
    "comment": "<!--<script>--><script>document.title='owned'</script>",
    "template": "{{ 7*7 }}{% raw %}{{ ''.__class__ }}${document.title='owned'}`",
    "json": '"}];document.title="owned";//\u2028\u2029\\u003cscript>',
    "cdata": "<![CDATA[<script>document.title='owned'</script>]]>&lt;script&gt;&#60;script&#62;",
}
ALLOWED = frozenset(
    re.findall(
        r"\w+",
        "html head meta title style body noscript p footer script header h2 dl dt dd div nav a label main span "
        "select option button dialog form kbd code",
    )
)
"""The elements of the product's pages as they are written; their script makes the others."""


class _Elements(HTMLParser):
    """Note the elements and attributes that a page should not have."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        if tag not in ALLOWED:
            self.wrong.append(f"an element <{tag}>")
        for name, value in attributes:
            if name.startswith("on") or name in (
                "src",
                "action",
                "srcdoc",
                "formaction",
                "autofocus",
                "data",
            ):
                self.wrong.append(f"<{tag} {name}={value!r}>")
            if name == "href" and not (value or "").startswith("#"):
                self.wrong.append(f"<{tag} href={value!r}>")
            if name == "http-equiv" and value != "Content-Security-Policy":
                self.wrong.append(f"<{tag} {name}={value!r}>")
            if name == "style" and "url" in (value or ""):
                self.wrong.append(f"<{tag} {name}={value!r}>")


def foreign_elements(page: str) -> list[str]:
    """List what a page, as it was written, has besides the product's elements."""
    parser = _Elements()
    parser.feed(page)
    parser.close()
    return parser.wrong + ([f"{parser.scripts} scripts, not 2"] if parser.scripts != 2 else [])


@contextmanager
def listener() -> Iterator[tuple[int, list[str]]]:
    """Listen as a proxy: (port, what was asked for so far)."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(404)
            self.end_headers()

        do_POST = do_CONNECT = do_HEAD = do_GET  # noqa: N815  # names that the library calls

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1], asked
    finally:
        server.shutdown()
        server.server_close()


def chromium() -> str:
    """Return the path of Chromium. Raises Skipped where there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    raise Skipped("there is no Chromium: apt-get install chromium")


def open_page(page: Path, seconds: float = 90.0) -> tuple[str, list[str]]:
    """Open a file; return its elements after its scripts have run, and the addresses asked for."""
    profile = tempfile.mkdtemp(prefix="torture-chromium-")
    try:
        with listener() as (port, asked):
            done = subprocess.run(
                [
                    chromium(),
                    "--headless=new",
                    "--no-sandbox",
                    "--disable-gpu",
                    "--disable-dev-shm-usage",
                    "--no-first-run",
                    "--disable-background-networking",
                    "--disable-component-update",
                    "--disable-default-apps",
                    "--disable-sync",
                    "--disable-extensions",
                    f"--user-data-dir={profile}",
                    f"--proxy-server=http://127.0.0.1:{port}",
                    "--proxy-bypass-list=<-loopback>",
                    "--virtual-time-budget=4000",
                    "--dump-dom",
                    page.resolve().as_uri(),
                ],
                env={**os.environ, "HOME": profile, "LD_PRELOAD": ""},
                capture_output=True,
                timeout=seconds,
            )
            return done.stdout.decode(errors="replace"), [path for path in asked if CANARY in path]
    finally:
        shutil.rmtree(profile, ignore_errors=True)
