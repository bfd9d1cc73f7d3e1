"""Hostile texts through every door: terminals, report pages, chat templates, and secrets in what is written.

Nothing that a text holds drives a terminal, no page runs a script or asks for anything, no template reaches Python, and
no secret is in a file or in the output.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tests.torture import browser, runs
from tests.torture.children import Child, rlhf
from tests.torture.experiment import Case, Skipped, Trial
from tests.torture.hostile.pages import judge_page
from tests.torture.hostile.secrets import SECRET_DOORS, judge_secret
from tests.torture.hostile.templates import TEMPLATES, judge_template
from tests.torture.hostile.terminals import DOORS, judge_terminal

SHARE = 1.5
PREPARED = "prepared"
JUDGES = {
    "terminal": judge_terminal,
    "template": judge_template,
    "secret": judge_secret,
    "page": judge_page,
}


def run(trial: Trial) -> None:
    names = [f"terminal {door}" for door in DOORS]
    names += [f"template {name}" for name in TEMPLATES]
    names += [f"secret {door}" for door in SECRET_DOORS]
    names += [f"page {name}" for name in browser.HTML]
    trial.random().shuffle(names)
    directory = Path(tempfile.mkdtemp(prefix="torture-hostile-"))
    try:
        prepared = directory / PREPARED
        runs.write(prepared, runs.SFT, runs.REWARD, runs.GRPO)
        ended = rlhf("run", "p.toml", cwd=prepared).wait(240)
        if ended.code:
            raise RuntimeError(f"the run from which the others are made {ended}")
        try:
            browser.chromium()
            # Its threads must not be in the process that forks.
            control = Child(_require_detection, directory).wait(240)
            if control.code:
                raise RuntimeError(f"the page that does what no page may do {control}")
        except Skipped as skipped:
            print(f"    {skipped}: no page is opened, but each is read", flush=True)
        trial.each(names, lambda case: _judge(case, prepared), seconds=900)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _require_detection(directory: Path) -> None:
    """Open a page that does what no page may do, so that a count of nothing means something."""
    page = directory / "control.html"
    page.write_text(
        f"<title>x</title>{browser.HTML['script']}{browser.HTML['image']}{browser.HTML['style']}", "utf-8"
    )
    shown, asked = browser.open_page(page)
    if "<title>owned</title>" not in shown or len(set(asked)) < 3:
        raise RuntimeError(f"the browser does not show what a hostile page does: {asked} {shown[:500]}")


def _judge(case: Case, prepared: Path) -> None:
    sort, _, name = case.name.partition(" ")
    work = case.directory / "work"
    shutil.copytree(prepared, work)
    JUDGES[sort](case, work, name)
