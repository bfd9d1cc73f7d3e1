"""What the page of a run warns of first, for the list of runs: found in the background, and kept.

Of long metrics the end and pieces of the rest are read, as the list does, so that figures may differ from the page's.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rlhf_core.hidden import scrub
from rlhf_report.watch.growing import parse
from rlhf_report.watch.listing import Fingerprint
from rlhf_report.watch.run_view import WatchedRun

SHARE = 0.002
"""The share of a core's time that judging a run that goes on may take: its files are read anew each time."""
MOST_BYTES = 2**16
"""Bytes of a file that is kept; they are much smaller."""


@dataclass(frozen=True)
class Alarm:
    """A warning, "" for none, the mark of the files that it was found in, when, and how long that took, in seconds."""

    text: str
    mark: str
    when: float = 0.0
    took: float = 0.0


class Alarms:
    """Reads runs, one after the other, in a thread that lives while there are some to read.

    folder: where what was found of runs that have ended is kept. Every method is safe to call from several threads.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._version = version("rlhf-report")
        self._known: dict[Path, Alarm] = {}
        self._waiting: dict[Path, tuple[str, bool]] = {}
        self._changed = threading.Condition()
        self._is_working = False

    def of(self, run: Path, fingerprint: Fingerprint) -> str | None:
        """Return what a run's files told last, None for nothing; they are read again where they have changed since."""
        mark = hashlib.sha256(repr((self._version, fingerprint)).encode()).hexdigest()
        is_running = bool(fingerprint[0])
        with self._changed:
            known = self._known.get(run) or self._kept(run)
            if known is None or (known.mark != mark and not (is_running and _is_soon(known))):
                self._waiting[run] = (mark, is_running)
                self._begin()
        return known.text or None if known else None

    def wait(self, seconds: float) -> None:
        """Wait until nothing is left to read, at most for a while."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_working, seconds)

    def _begin(self) -> None:
        if not self._is_working:
            self._is_working = True
            threading.Thread(target=self._work, name="alarms", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._is_working = False
                    self._changed.notify_all()
                    return
                run, (mark, is_running) = next(iter(self._waiting.items()))
            began = time.monotonic()
            text = _first_warning(run)
            now = time.monotonic()
            alarm = Alarm(text, mark, now, now - began)
            with self._changed:
                self._known[run] = alarm
                del self._waiting[run]
            if not is_running:
                self._keep(run, alarm)

    def _file(self, run: Path) -> Path:
        return self._folder / f"{hashlib.sha256(os.fsencode(run)).hexdigest()[:24]}-alarm.json"

    def _kept(self, run: Path) -> Alarm | None:
        """Read what an earlier server found; None where it found nothing, or its file is damaged."""
        try:
            with open(self._file(run), "rb") as file:
                content = parse(file.read(MOST_BYTES)) or {}
        except OSError:
            return None
        text, mark = content.get("alarm"), content.get("mark")
        if not isinstance(text, str) or not isinstance(mark, str):
            return None
        self._known[run] = Alarm(text, mark)
        return self._known[run]

    def _keep(self, run: Path, alarm: Alarm) -> None:
        """Write a file that only the user may read: prompts are private. Without a place to write, nothing is kept."""
        path = self._file(run)
        fresh = path.with_suffix(f".{os.getpid()}")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump({"alarm": alarm.text, "mark": alarm.mark}, file)
            fresh.replace(path)
        except OSError:
            return


def _is_soon(known: Alarm) -> bool:
    """Return whether a run that goes on was read too short a time ago to be read again."""
    return (time.monotonic() - known.when) * SHARE < known.took


def _first_warning(run: Path) -> str:
    """Return the heaviest warning of a run, with its stage's name where that is not the last; "" if there is none."""
    try:
        stages = WatchedRun("", run, is_whole=False).answer()["stages"]
    except Exception:  # a directory may vanish, or hold anything: the list says so by itself
        return ""
    return scrub(_first(stages))


def _first(stages: Sequence[Mapping[str, Any]]) -> str:
    warned = [(stage["name"], each) for stage in reversed(stages) for each in _warnings(stage)[:1]]
    if not warned:
        return ""
    name, first = max(warned, key=lambda found: found[1]["weight"])
    return str(first["text"]) if name == stages[-1]["name"] else f"{name}: {first['text']}"


def _warnings(stage: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [each for each in stage["verdict"] if each["tone"] == "warning"]
