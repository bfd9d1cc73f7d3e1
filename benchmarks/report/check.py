"""Open a report in a real headless browser and look for what a reader would trip over.

    python benchmarks/report/check.py PAGE.html [--chromium /usr/bin/chromium] [--driver chromedriver] [--out DIR]

Needs selenium in the Python it runs in, a Chromium and its driver; installs nothing. Prints one JSON object: of each
width and colour scheme the errors of the console, what was asked of the network, how many charts were drawn and how
long that took, whether the page scrolls sideways, and how long the frames of a drag along the smoothing slider are.
Screenshots go to DIR. Exit code 1 where something is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

SCREENS = {
    "desktop": (1280, 900, False, "light"),
    "desktop-dark": (1280, 900, False, "dark"),
    "phone": (390, 844, True, "light"),
    "phone-dark": (390, 844, True, "dark"),
}
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
DRAWN = "return window.rlhfCharts ? [...rlhfCharts.values()].filter(Boolean).length : 0"
SMOOTH = """
const done = arguments[0], slider = document.getElementById('smooth'), frames = [];
let last = performance.now(), n = 0;
const tick = (now) => {
  frames.push(now - last); last = now;
  if (++n > 40) { frames.sort((a, b) => a - b); return done({median: frames[20], longest: frames.at(-1)}); }
  slider.value = n % 21; slider.dispatchEvent(new Event('input')); requestAnimationFrame(tick);
};
requestAnimationFrame(tick);
"""
KEYS = """
const figure = document.querySelector('[data-chart]'); figure.scrollIntoView({block: 'center'}); figure.focus();
for (const key of ['ArrowRight', 'ArrowLeft']) figure.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));
const at = figure.querySelector('.at'); return at.hidden ? '' : at.textContent;
"""


def browser(chromium: str, driver: str) -> webdriver.Chrome:
    options = Options()
    options.binary_location = chromium
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options=options, service=Service(driver))
    chrome.set_script_timeout(60)
    return chrome


def look(chrome: webdriver.Chrome, page: Path, out: Path, name: str) -> dict[str, Any]:
    """What one screen shows of the page."""
    width, height, phone, scheme = SCREENS[name]
    metrics = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    chrome.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": phone})
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    for kind in ("browser", "performance"):
        chrome.get_log(kind)
    began = time.monotonic()
    chrome.get(page.resolve().as_uri())
    wanted = chrome.execute_script("return document.querySelectorAll('[data-chart]').length")
    while (drawn := chrome.execute_script(DRAWN)) < wanted and time.monotonic() - began < 60:
        time.sleep(0.05)
    seconds = time.monotonic() - began
    time.sleep(0.5)
    errors = [
        entry["message"] for entry in chrome.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")
    ]
    sent = [json.loads(entry["message"])["message"] for entry in chrome.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in sent if m["method"] == "Network.requestWillBeSent"]
    found = {
        "errors": errors,
        "requests": [url for url in asked if not url.startswith(("file:", "data:", "blob:"))],
        "charts": wanted,
        "drawn": drawn,
        "seconds_until_all_drawn": round(seconds, 2),
        "scroll_width": chrome.execute_script("return document.documentElement.scrollWidth"),
        "width": chrome.execute_script("return document.documentElement.clientWidth"),
        "keyboard": chrome.execute_script(KEYS) if wanted else "no charts",
    }
    if wanted:
        found["frame_ms_while_smoothing"] = chrome.execute_async_script(SMOOTH)
        chrome.execute_script(
            "const s = document.getElementById('smooth'); s.value = 5; s.dispatchEvent(new Event('input'))"
        )
    chrome.execute_script("scrollTo(0, 0); document.activeElement.blur()")
    size = chrome.execute_script("return document.documentElement.scrollHeight")
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {**metrics, "height": size})
    time.sleep(0.5)
    chrome.save_screenshot(str(out / f"{name}.png"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--driver", default="/usr/bin/chromedriver")
    parser.add_argument("--out", type=Path, default=Path("runs/report-check"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    chrome = browser(arguments.chromium, arguments.driver)
    try:
        found = {name: look(chrome, arguments.page, arguments.out, name) for name in SCREENS}
    finally:
        chrome.quit()
    problems = [
        f"{name}: {wrong}"
        for name, seen in found.items()
        for wrong, is_so in {
            "errors in the console": bool(seen["errors"]),
            "asks the network": bool(seen["requests"]),
            "charts not drawn": seen["drawn"] < seen["charts"],
            "scrolls sideways": seen["scroll_width"] > seen["width"],
            "arrow keys do nothing": not seen["keyboard"],
            "2 MB or more": arguments.page.stat().st_size >= 2_000_000,
        }.items()
        if is_so
    ]
    print(json.dumps({"bytes": arguments.page.stat().st_size, "problems": problems, **found}, indent=2))
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
