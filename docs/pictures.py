"""Take the pictures of a run's pages in docs/pictures, in both themes and at the width of a phone.

rlhf watch runs &
python docs/pictures.py http://127.0.0.1:8080 [RUN]

Needs Chromium. RUN: the name of a run with rollouts; default: the first in the list.
"""

from __future__ import annotations

import json
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PICTURES = ROOT / "docs" / "pictures"
DESK, PHONE = (1280, 860), (390, 844)
LOOKS = {"light": (DESK, False), "dark": (DESK, True), "phone": (PHONE, False)}
KEPT = {"run": ("light",), "tokens": ("light",)}
"""Pictures that the documentation has; the others are looked at, in the folder that is given."""


def answer(address: str, path: str) -> Any:
    """Read a route of the server."""
    with urllib.request.urlopen(f"{address}/api/{path}") as response:
        return json.load(response)


def views(address: str, name: str) -> dict[str, tuple[str, str]]:
    """Return {name of a picture: (fragment of its address, what must be there)}."""
    runs = answer(address, "runs")["runs"]
    chosen = next(run for run in runs if name in ("", run["name"]))
    run = answer(address, f"runs/{chosen['id']}")
    stage = next(stage for stage in run["stages"] if stage["rollouts"])
    update = stage["rollouts"][len(stage["rollouts"]) // 8]
    place = f"run/{run['id']}/{stage['name']}"
    first = answer(address, f"runs/{run['id']}/{stage['name']}/rollouts?update={update}&sort=-spread&limit=1")
    completion = first["groups"][0]["completions"][0]["index"]
    found = {
        "runs": ("", ".run"),
        "run": (place, ".plot .line"),
        "update": (f"{place}/update/{update}?sort=-spread", ".completion"),
        "tokens": (f"{place}/update/{update}?sort=-spread&completion={update}.{completion}", ".token"),
    }
    alike = [each["id"] for each in runs if each["stage"] == stage["name"] and each["id"] != run["id"]]
    if alike:
        ids = f"{run['id']},{alike[0]}"
        found["compare"] = (f"compare/{ids}?stage={stage['name']}", ".plot .line")
    return found


def main() -> None:
    """Write the pictures; those that the documentation does not have, into a temporary folder."""
    from tests.shared.chromium import PROGRAM, Chromium

    if PROGRAM is None:
        sys.exit("there is no Chromium: apt-get install chromium")
    address = sys.argv[1].rstrip("/")
    PICTURES.mkdir(exist_ok=True)
    others = Path(tempfile.mkdtemp(prefix="pictures-"))
    print(f"{PICTURES.relative_to(ROOT)}, and {others}")
    with Chromium() as browser:
        for name, (fragment, wanted) in views(address, sys.argv[2] if len(sys.argv) > 2 else "").items():
            for kind, ((width, height), dark) in LOOKS.items():
                browser.look(width=width, height=height, dark=dark)
                browser.open(f"{address}/#/{fragment}", f"document.querySelector('{wanted}')")
                folder = PICTURES if kind in KEPT.get(name, ()) else others
                browser.picture(folder / f"{name}-{kind}.png", whole=False)
        if browser.errors:
            sys.exit("\n".join(browser.errors))


if __name__ == "__main__":
    main()
