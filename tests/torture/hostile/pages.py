"""Texts in report pages: none runs as a script or asks for anything."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from tests.shared.report_runs import answers_in, texts
from tests.torture import browser
from tests.torture.children import rlhf
from tests.torture.experiment import Case, Skipped
from tests.torture.hostile.inputs import file_name, plant_text


def judge_page(case: Case, work: Path, name: str) -> None:
    """Plant a text in all that a run's files say, and read and open its pages."""
    text = browser.HTML[name]
    run = work / file_name(f"run{text}")
    os.rename(work / "run", run)
    plant_text(run, text)
    shutil.copytree(run, work / "second")
    ended = [
        rlhf("report", str(run), "-o", "report.html", cwd=work).wait(),
        rlhf("compare", str(run), "second", "-o", "compare.html", cwd=work).wait(),
    ]
    for each in ended:
        case.require(each.code == 0, f"{each}")
    for page in (work / "report.html", work / "compare.html"):
        content = page.read_text(encoding="utf-8")
        found = texts(answers_in(content))
        case.require(any(text in each for each in found), f"{page.name} has no text")
        for what in browser.foreign_elements(content)[:5]:
            case.fail(f"{page.name}: {what}")
        case.count("pages")
        if not _has_browser():
            continue
        unprotected = page.with_name(f"unprotected-{page.name}")
        unprotected.write_text(re.sub(r"<meta http-equiv=[^>]*>", "", content), encoding="utf-8")
        for path in (page, unprotected):
            shown, asked = browser.open_page(path)
            title = re.search(r"<title>(.*?)</title>", shown, re.DOTALL)
            if title is None or title[1] == "owned" or " · rlhf" not in title[1]:
                case.fail(f"{path.name}: a script has run, the title is {title and title[1]!r}")
            if asked:
                case.fail(f"{path.name}: asks for {asked}")
            case.count("openings")


def _has_browser() -> bool:
    try:
        return bool(browser.chromium())
    except Skipped:
        return False
