"""The page of `rlhf watch` in Chromium, live and frozen into a file; `make test-pages` runs it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rlhf_report
from rlhf_report.frozen import frozen

from tests.shared import page_answers, report_runs
from tests.shared.chromium import PROGRAM, Chromium
from tests.torture.browser import CANARY, HTML

pytestmark = [
    pytest.mark.pages,
    pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium: apt-get install chromium"),
]
TEXT = "<b>bold</b>"
VIEWS = {
    "run/a": [
        "The reward rose by 0.4",
        "Reward",
        "The lengths run away",
        "Longer is better",
        "See the completions of update 41 whose rewards differ most",
        "1 check found nothing wrong",
        "before the first update",
    ],
    "run/a/rm": ["ann <b>bold</b>", "0.75", "4 of 4", "Newest rows"],
    "run/a/policy/update/40": ["×7", "brevity", "ended: length", "version 39 (1 old)", "advantage −0.3"],
    "run/a/rm/rows/4": ["pairs.jsonl row 2 <b>bold</b>", "0.3333", "margin 2"],
    "run/a/rm/evaluation/4": [
        "pairs.jsonl row 0",
        "change +0.5",
        "evaluation at update 2: a rise is better",
        "same prompt as x.jsonl row 7",
    ],
    "compare/a,b?all=1": [
        "learning_rate",
        "0.01 <b>bold</b>",
        "0.3333",
        "reply <b>bold</b>",
        "= rewards/model/mean",
    ],
}
LIVE = {
    "": [
        "first <b>bold</b>",
        "failed",
        "60 of 100",
        "1 min 20 s left",
        "1 warning",
        "⚠ Longer is better.",
        "Permission denied",
    ]
} | VIEWS
CONTRAST = """
(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const over = (colours) => {
    canvas.fillStyle = "#fff";
    canvas.fillRect(0, 0, 1, 1);
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (colour) => {
    const part = colour.map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2];
  };
  const faint = new Set();
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || !element.checkVisibility() || element.closest("noscript, script")) continue;
    const own = getComputedStyle(element);
    const behind = [];
    for (let each = element; each; each = each.parentElement) behind.unshift(getComputedStyle(each).backgroundColor);
    const [a, b] = [light(over(behind)), light(over([...behind, element.closest("svg") ? own.fill : own.color]))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const name = element.className.baseVal ?? element.className;
    if (ratio < 4.5) faint.add(`${ratio.toFixed(2)} ${name} ${texts.currentNode.data.slice(0, 30)}`);
  }
  return [...faint];
})()
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium() as opened:
        yield opened


@pytest.fixture(autouse=True)
def _as_before(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test starts with a wide window, in the light, and ends without an error of the page."""
    browser: Chromium = request.getfixturevalue("browser")
    browser.look(width=1280, height=900, dark=False)
    browser.errors.clear()
    yield
    assert browser.errors == []


@pytest.fixture(params=["live", "frozen"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    found = page_answers.answers(TEXT)
    if request.param == "frozen":
        file = tmp_path / "report.html"
        file.write_text(frozen(found, f"first {TEXT}"), encoding="utf-8")
        yield file.as_uri()
    else:
        with page_answers.serve(found) as served:
            yield served


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of `rlhf watch` on two runs, and their directory."""
    directory = tmp_path_factory.mktemp("watched")
    report_runs.make_run(directory / "first")
    report_runs.make_run(directory / "second", rate=3e-4, offset=0.5)
    command = [sys.executable, "-m", "rlhf_core.cli", "watch", str(directory), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        assert server.stdout is not None
        address = next(filter(None, (re.search(r"http://\S+", line) for line in server.stdout)))
        yield f"{address[0]}/", directory
        server.kill()


def get(address: str, route: str) -> Any:
    with urllib.request.urlopen(f"{address}{route}") as answer:
        return json.load(answer)


def text(browser: Chromium) -> str:
    return str(browser.read("document.body.innerText"))


@pytest.mark.parametrize("width", [1280, 390])
def test_every_view_says_what_the_answers_say(browser: Chromium, address: str, width: int) -> None:
    browser.look(width=width, height=800, dark=False)
    views = VIEWS if address.startswith("file:") else LIVE
    for view, expected in views.items():
        browser.open(f"{address}#/{view}")
        shown = text(browser)
        missing = [words for words in expected if words not in shown]
        assert not missing, (view, missing, shown)
        assert browser.read("document.documentElement.scrollWidth") <= width, view


def test_runs_are_shown_as_rlhf_watch_answers_and_as_a_report_of_its_answers(
    browser: Chromium, watched: tuple[str, Path], tmp_path: Path
) -> None:
    served, directory = watched
    file = rlhf_report.compare([directory / "first", directory / "second"], tmp_path / "report.html")
    ids = [run["id"] for run in report_runs.Report(file).all["api/runs"]["runs"]]
    browser.open(served)
    names = browser.read("[...document.querySelectorAll('.run a')].map((e) => e.innerText)")
    assert sorted(names) == ["first", "second"]
    run = get(served, f"api/runs/{ids[0]}")
    views = [f"compare/{','.join(ids)}"]
    parts = "h1, .legend, .completion .text, .row, [data-key^=numbers] td"
    for stage in run["stages"]:
        place = f"run/{ids[0]}/{stage['name']}"
        views += [place, *(f"{place}/update/{update}" for update in stage["rollouts"][-1:])]
        views += [
            f"{place}/{kind}/{update}" for kind in ("rows", "evaluations") for update in stage[kind][-1:]
        ]
    for view in views:
        shown = []
        for address in (served, file.as_uri()):
            chosen = "?stage=policy&all=1" if view.startswith("compare") else "?all=1"
            browser.open(f"{address}#/{view.replace('evaluations', 'evaluation')}{chosen}")
            fold = "document.querySelector('[data-key^=results]')"
            browser.read(f"{fold} && ({fold}.open = true)")
            browser.wait(f"!{fold} || document.querySelector('[data-key^=numbers]')")
            assert browser.read("document.querySelector('[role=alert]')?.innerText ?? ''") == "", view
            shown.append(browser.read(f"[...document.querySelectorAll('{parts}')].map((e) => e.innerText)"))
        assert shown[0] == shown[1], view
        assert len(shown[0]) > 1 or "evaluations" in view, view  # the evaluation of this run has no rows


@pytest.mark.parametrize("dark", [False, True])
def test_every_text_has_the_contrast_of_wcag_aa(browser: Chromium, address: str, dark: bool) -> None:
    browser.look(width=1280, height=900, dark=dark)
    tokens = "run/a/policy/update/40?completion=40.0&colour=sampler_logps"
    for view in VIEWS if address.startswith("file:") else [*LIVE, tokens]:
        browser.open(f"{address}#/{view}")
        if "completion" in view:
            browser.wait("document.querySelector('.token')")
        assert browser.read(CONTRAST) == [], view


def test_a_report_shows_every_stage_and_what_it_came_to(browser: Chromium, address: str) -> None:
    """A live page shows it when it is unfolded."""
    browser.open(f"{address}#/run/a")
    expected = {
        *("reward <b>bold</b>", "pairs.jsonl <b>bold</b>", f"To continue: rlhf run {TEXT}", "seed 7"),
        *("Asked <b>bold</b>", f"answer {TEXT} 42 {TEXT}", "×3", "mean of 4: 1.5", "▲ higher"),
        *("the same text", "turn 1", "5 tokens", f"malformed call: no {TEXT}", f"dropped: failed {TEXT}"),
        *("Held-out pairs", f"chosen {TEXT}", "-0.5", f"weights.jsonl {TEXT}", f"Rewards {TEXT}"),
        *("saved, update 40", "Always 0, and not drawn: zero."),
    }
    if address.startswith("file:"):
        expected |= {"The reward rose by 0.4", "rm reward", "Where the time went", "Made by rlhf"}
    else:
        browser.click("[data-key='more']")
        browser.click("[data-key='results policy'] summary")
        browser.wait("document.querySelector('.plot .column')")
    shown = text(browser)
    assert not [words for words in expected if words not in shown], shown
    bars = browser.read(
        "[...document.querySelectorAll('.column')].map((bar) => Number(bar.getAttribute('height')))"
    )
    assert [height / bars[0] for height in bars[:2]] == pytest.approx([1, 3], rel=1e-3)  # 25 and 75 per cent


def test_texts_of_files_are_never_markup(browser: Chromium, tmp_path: Path) -> None:
    hostile = " ".join(HTML.values()) + " \u202egnp.exe\x1b[2J\ud800"
    found = page_answers.answers(hostile)
    file = tmp_path / "report.html"
    file.write_text(frozen(found, hostile[:-1]), encoding="utf-8")
    with page_answers.serve(found) as served:
        for address in (served, file.as_uri()):
            for view in LIVE if address == served else VIEWS:
                browser.open(f"{address}#/{view}")
                assert browser.read("document.title").endswith(" · rlhf"), view
                assert (
                    browser.read(
                        f"document.querySelectorAll('[src*=\"{CANARY}\"], iframe, main script').length"
                    )
                    == 0
                )
                assert "\u202e" not in text(browser), view
            assert "\\u202egnp.exe\\x1b[2J\\ud800" in text(browser)


def test_a_new_update_appears_within_five_seconds(browser: Chromium) -> None:
    found = page_answers.answers()
    with page_answers.serve(found) as address:
        browser.open(f"{address}#/run/a?smooth=0.05")
        before = browser.read("document.querySelector('.plot .line').getAttribute('d')")
        found.update(page_answers.answers(updates=80))
        took = browser.wait("document.querySelector('.run-stage b').textContent === '80'", 10)
        grown = browser.wait(
            f"document.querySelector('.plot .line').getAttribute('d') !== {json.dumps(before)}", 10
        )
        assert took + grown < 5
        browser.open(f"{address}#/")
        assert "80 of 100" in text(browser)


def test_three_clicks_lead_from_a_kink_to_a_tokens_numbers(browser: Chromium) -> None:
    """To the last bit: the number that is read is the float32 of the file."""
    found = page_answers.answers()
    with page_answers.serve(found) as address:
        browser.open(f"{address}#/run/a")
        click_at(browser, "[data-key='chart Reward'] .plot", 40)
        browser.wait("document.querySelector('h1').textContent.startsWith('Update 40')")
        browser.click(".completion button")
        browser.wait("document.querySelector('.token')")
        browser.click(".token:nth-child(3)")
        shown = browser.read("[...document.querySelectorAll('.numbers dd')].map((e) => e.textContent)")
        tokens = found["api/runs/a/policy/rollouts/40/completions/0"]
        assert np.float32(shown[3]) == np.float32(tokens["sampler_logps"][2])
        assert np.float32(shown[4]) == np.float32(tokens["trainer_logps"][2])
        difference = np.float32(tokens["trainer_logps"][2]) - np.float32(tokens["sampler_logps"][2])
        assert np.float32(shown[5]) == difference
        assert "Not recorded: entropy" in text(browser)
        unseen = browser.read(
            "[...document.querySelectorAll('.token')].map((e) => e.classList.contains('unseen'))"
        )
        assert unseen == [False, True, False, False]


def place_of(browser: Chromium, plot: str, update: int) -> dict[str, float]:
    """Return where an update is in a chart of updates 1 to 60, scrolling to it."""
    box = browser.box(plot)
    left, right = 52, 10
    share = (update - 1) / (page_answers.UPDATES - 1)
    return {"x": box["x"] + left + share * (box["width"] - left - right), "y": box["y"] + 80}


def click_at(browser: Chromium, plot: str, update: int) -> None:
    drag(browser, plot, update, update)


def drag(browser: Chromium, plot: str, start: int, end: int) -> None:
    """Move to an update, press, move to another, release."""
    first, last = place_of(browser, plot, start), place_of(browser, plot, end)
    for kind, place in (
        ("mouseMoved", first),
        ("mousePressed", first),
        ("mouseMoved", last),
        ("mouseReleased", last),
    ):
        browser.call("Input.dispatchMouseEvent", type=kind, button="left", buttons=1, clickCount=1, **place)


def test_the_table_beside_a_chart_has_its_numbers(browser: Chromium, address: str) -> None:
    browser.open(f"{address}#/run/a/policy")
    browser.click("[data-key='values Reward'] summary")
    browser.wait("document.querySelector(\"[data-key='values Reward'] td\")")
    cells = browser.read(
        "[...document.querySelectorAll(\"[data-key='values Reward'] tbody tr\")].map((row) => "
        "[...row.cells].map((cell) => cell.textContent))"
    )
    expected = {row["step"]: row for row in page_answers.metrics()}
    assert len(cells) == len(expected)
    for step, reward, held_out in cells:
        row = expected[int(step)]
        assert np.float32(reward) == np.float32(row["reward"])
        assert (held_out != "") == ("eval_reward" in row)


def test_numbers_are_written_shortly_and_without_loss(browser: Chromium) -> None:
    random = np.random.default_rng(0)
    sizes = 10.0 ** random.integers(-30, 30, 2000)
    values = (random.normal(size=2000) * sizes).astype(np.float32)
    with page_answers.serve(page_answers.answers()) as address:
        browser.open(address)
        numbers = json.dumps([float(value) for value in values])
        texts = browser.read(f"import('./static/dom.js').then((dom) => {numbers}.map(dom.exact))")
    assert np.array_equal(np.array([np.float32(each) for each in texts]), values)
    assert max(len(re.sub(r"e.*|[-.]", "", each).strip("0")) for each in texts if len(each) < 15) <= 9


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_smoothing_is_the_centred_mean_over_a_share_of_the_axis(browser: Chromium, share: float) -> None:
    random = np.random.default_rng(1)
    x = np.cumsum(random.uniform(0.1, 3.0, 300))
    y = random.normal(size=300)
    with page_answers.serve(page_answers.answers()) as address:
        browser.open(address)
        given = json.dumps([x.tolist(), y.tolist(), share])
        smoothed = browser.read(f"import('./static/chart.js').then((chart) => chart.smoothed(...{given}))")
    reach = np.minimum(share * (x[-1] - x[0]) / 2, np.minimum(x - x[0], x[-1] - x))
    expected = [y[np.abs(x - x[i]) <= reach[i] + 1e-9 * (x[-1] - x[0])].mean() for i in range(300)]
    np.testing.assert_allclose(smoothed, expected, rtol=1e-9, atol=1e-9)


def test_everything_is_reached_by_keyboard(browser: Chromium) -> None:
    focus = "document.activeElement.dataset.key"
    with page_answers.serve(page_answers.answers()) as address:
        browser.open(address)
        browser.press("j")
        browser.press("j")
        assert browser.read(focus) == "run b"
        browser.press("k")
        browser.press("x")
        assert "chosen=a" in browser.read("location.hash")
        browser.press("Enter")
        browser.wait("document.querySelector('.chart')")
        browser.press("/")
        assert browser.read(focus) == "metrics"
        browser.press("Escape")
        browser.press("?")
        assert browser.read("document.getElementById('help').open")
        browser.press("Escape")
        browser.open(f"{address}#/run/a/policy/update/40?completion=40.0")
        browser.wait("document.querySelector('.token')")
        browser.read("document.querySelector('.token').focus()")
        browser.press("ArrowRight")
        assert browser.read("document.querySelector('.numbers dd').textContent") == "1 of 4"
        browser.press("n")
        browser.wait("document.querySelector('h1').textContent.startsWith('Update 41')")
        browser.press("u")
        browser.wait("location.hash === '#/run/a/policy'")


def test_choices_are_in_the_address(browser: Chromium) -> None:
    with page_answers.serve(page_answers.answers()) as address:
        browser.open(f"{address}#/run/a/policy?x=tokens&smooth=0.1&log=1&all=1")
        assert browser.read("document.querySelector('.tools select').value") == "tokens"
        assert browser.read("document.querySelector('.tools input[type=checkbox]').checked")
        assert browser.read("document.querySelectorAll('.chart').length") == 4
        assert browser.read("document.querySelectorAll('.line.raw').length") >= 3
        browser.open(f"{address}#/run/a/policy")
        assert browser.read("document.querySelectorAll('.chart').length") == 3
        assert browser.read("document.querySelectorAll('.missing').length") == 1, "the loss of update 33"
        assert browser.read("document.querySelectorAll('.event.warning').length") == 3


def test_a_drag_shows_a_part_of_the_curves(browser: Chromium) -> None:
    with page_answers.serve(page_answers.answers()) as address:
        browser.open(f"{address}#/run/a/policy")
        drag(browser, "[data-key='chart Reward'] .plot", 20, 40)
        hash = str(browser.read("location.hash"))
        shown = {name: float(part) for name, part in re.findall(r"(from|to)=([\d.]+)", hash)}
        assert shown == pytest.approx({"from": 20, "to": 40}, abs=0.3)
        browser.open(f"{address}{hash}")
        browser.click("[data-key='values Reward'] summary")
        browser.wait("document.querySelector(\"[data-key='values Reward'] td\")")
        steps = browser.read(
            "[...document.querySelectorAll(\"[data-key='values Reward'] tbody th\")].map((e) => e.innerText)"
        )
        assert {int(step) for step in steps} <= set(range(20, 41))
        assert len(steps) > 18
        browser.read(
            "[...document.querySelectorAll('button')].find((e) => e.innerText === 'Show all').click()"
        )
        assert "from" not in browser.read("location.hash")


def test_a_report_sorts_and_searches_by_itself(browser: Chromium, address: str) -> None:
    if not address.startswith("file:"):
        pytest.skip("the server sorts and searches")
    rows = "[...document.querySelectorAll('.group h2')].map((e) => e.firstChild.data)"
    browser.open(f"{address}#/run/a/policy/update/40?sort=-spread")
    assert browser.read(rows) == ["row 6", "row 5"]
    browser.open(f"{address}#/run/a/policy/update/40?finish=length&where=reward&least=2")
    assert browser.read(rows) == ["row 5"]
    browser.open(f"{address}#/run/a/policy/update/40?search=no+such+word")
    assert "0 groups" in text(browser)
    browser.open(f"{address}#/run/a/rm/rows/4?sort=-row")
    assert "row 2" in browser.read("document.querySelector('.row').innerText")


def test_charts_are_drawn_in_a_picture_and_on_paper(browser: Chromium, address: str) -> None:
    """Without scrolling to them, and folded ones, too; in a report those of all stages, and histograms."""
    browser.open(f"{address}#/run/a?all=1")
    drawn = "[...document.querySelectorAll('.plot')].map((plot) => plot.querySelectorAll('.line').length > 0)"
    count = 9 if address.startswith("file:") else 4
    assert browser.read(drawn) == [True] * count
    ticks = "[...plot.querySelectorAll('text[text-anchor=end]')].map((tick) => tick.textContent)"
    for labels in browser.read(f"[...document.querySelectorAll('.plot')].map((plot) => {ticks})"):
        assert len(set(labels)) == len(labels)
    browser.look(width=800, height=600, dark=True, media="print")
    assert browser.read(drawn) == [True] * count
    assert browser.read(CONTRAST) == []


def test_a_key_is_asked_for_and_given_in_a_request(browser: Chromium) -> None:
    with page_answers.serve(page_answers.answers(), key="right") as address:
        browser.open(f"{address}#/run/a")
        field = "document.querySelector('input[type=password]')"
        give = "document.querySelector('.key-form button').click()"
        browser.read(f"{field}.value = 'wrong'; {give}")
        browser.wait("document.body.innerText.includes('This is not the key.')")
        browser.read(f"{field}.value = 'right'; {give}")
        browser.wait("document.querySelector('.chart')")
        assert "right" not in browser.read("location.href")
    browser.errors.clear()  # a browser notes an answer of 401 as one


def test_a_server_that_is_gone_is_said(browser: Chromium) -> None:
    with page_answers.serve(page_answers.answers()) as address:
        browser.open(f"{address}#/run/a")
        browser.open(f"{address}#/run/nobody")
        assert "nothing is at api/runs/nobody" in text(browser)
        browser.open(f"{address}#/run/a")
    browser.wait("document.getElementById('freshness').textContent === 'The server does not answer.'", 15)
    browser.errors.clear()
