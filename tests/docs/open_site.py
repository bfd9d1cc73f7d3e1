"""Open the site in a browser: no link leads nowhere, the search finds, nothing is asked of another host.

python tests/docs/open_site.py .site/html/latest
"""

from __future__ import annotations

import functools
import html
import re
import shutil
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

LINK = re.compile(r'<(a|link|script|img|source)\b[^>]*?\b(?:href|src)="?([^"\s>]+)')
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


class Quiet(SimpleHTTPRequestHandler):
    """A server that logs nothing."""

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def dead_links(site: Path) -> tuple[int, list[str]]:
    """Follow every link and source within the site, anchors too; return how many there are, and the dead ones."""
    texts = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    anchors = {page: set(re.findall(r'\bid="?([^"\s>]+)', text)) for page, text in texts.items()}
    dead, count = [], 0
    for page, text in texts.items():
        for tag, address in LINK.findall(text):
            parts = urlsplit(html.unescape(address))
            count += 1
            if parts.scheme or parts.netloc:
                if tag != "a":
                    dead.append(f"{page.relative_to(site)}: loads {address} from elsewhere")
                continue
            start = site if parts.path.startswith("/") else page.parent
            target = (start / unquote(parts.path).lstrip("/")).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            known = anchors.get(target, set())
            if not target.exists() or (
                parts.fragment and target in texts and unquote(parts.fragment) not in known
            ):
                dead.append(f"{page.relative_to(site)}: {address} leads nowhere")
    return count, dead


def search(address: str, browser: str, text: str) -> tuple[str, list[str], list[str]]:
    """Search as a reader does; return the page found, what other hosts were asked for, and errors of scripts."""
    from playwright.sync_api import sync_playwright

    asked: list[str] = []
    errors: list[str] = []
    with sync_playwright() as driver:
        window = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = window.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
        page.goto(address, wait_until="networkidle")
        page.get_by_role("button", name="Search").first.click()
        page.get_by_role("combobox").or_(page.get_by_role("textbox")).first.wait_for()
        page.keyboard.type(text)
        # Results of a part of the text, or of a part of the index, are shown before: wait for what Enter will open.
        page.get_by_role("option", selected=True).filter(has_text=text).wait_for()
        page.keyboard.press("Enter")
        page.wait_for_url(lambda url: url.split("#")[0].split("?")[0] != address)
        found = page.inner_text("main")
        window.close()
    return found, [url for url in asked if not url.startswith(address[: address.index("/", 8)])], errors


def main(site: Path) -> int:
    """Check and print; return the exit code."""
    count, dead = dead_links(site)
    print("\n".join(dead) if dead else f"{count} links on {len(list(site.rglob('*.html')))} pages, none dead")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print("not opened in a browser: none of", ", ".join(BROWSERS), "is installed")
        return bool(dead)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site.parent)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    found, elsewhere, errors = search(
        f"http://127.0.0.1:{server.server_port}/{site.name}/", browser, "epsilon_high"
    )
    print(
        "the search for epsilon_high finds",
        "a page that has it" if "epsilon_high" in found else "another page",
    )
    print(
        "asked of other hosts:",
        ", ".join(elsewhere) or "nothing",
        "· errors of scripts:",
        "; ".join(errors) or "none",
    )
    return bool(dead or elsewhere or errors or "epsilon_high" not in found)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
