"""The console in its forms, and metrics.jsonl."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import math
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from rlhf_core import LOGGER, Stage, plugins
from rlhf_core.config import TrainerConfig
from rlhf_core.contracts import Artifact
from rlhf_core.errors import Stopped
from rlhf_core.fit.progress import cut_files, metric_files
from rlhf_core.loggers.console import Console, Pace, clock, number
from rlhf_core.mesh import make_mesh
from rlhf_core.stage.execute import make_loggers

LOGGERS = plugins.load().registry
JSON_LINES: Any = LOGGERS.get(LOGGER, "jsonl")
METRICS = {
    "loss": 0.6931,
    "reward": 1.25,
    "kl": math.nan,
    "learning_rate": 1e-5,
    "tokens_per_second": 12345.6,
    "step_time": 0.5,
}


def make_stage(directory: Path, *, is_main: bool = True) -> Stage:
    mesh = make_mesh(devices=jax.devices()[:2])
    directory.mkdir(parents=True, exist_ok=True)
    return Stage("policy", directory, 3, mesh, is_main, None, None)  # type: ignore[arg-type]


def play(logger: Any, stage: Stage, error: BaseException | None = None) -> None:
    """Send loggers the events of a stage of 40 updates."""
    host = plugins.empty_host()
    host.pm.register(logger)
    hook = host.hook
    hook.rlhf_stage_start(stage=stage, config=TrainerConfig())
    (stage.dir / "plan.json").write_text('{"updates": 40, "start": 0}')
    for step in (10, 20):
        hook.rlhf_step_end(stage=stage, step=step, metrics={**METRICS, "loss": 6.931 / step})
        hook.rlhf_step_end(
            stage=stage, step=step, metrics={"eval_accuracy": 0.98, "eval_tokens_per_second": 1.0}
        )
    path = stage.dir / "artifacts" / "model"
    hook.rlhf_artifact_saved(stage=stage, artifact=Artifact("model", "language_model", path))
    hook.rlhf_stage_end(stage=stage, error=error)


class Terminal:
    """Replace stderr by a pseudo terminal of 80 columns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.file = os.fdopen(theirs, "w")
        self.seen = b""
        self.reader = threading.Thread(target=self.read)
        self.reader.start()

    def attach(self) -> None:
        """Install it as sys.stderr, in the test itself: pytest sets its own after the fixtures."""
        self.monkeypatch.setattr(sys, "stderr", self.file)

    def read(self) -> None:
        try:
            while chunk := os.read(self.ours, 4096):
                self.seen += chunk
        except OSError:  # the other end was closed
            pass

    def text(self) -> str:
        self.file.close()
        self.reader.join()
        os.close(self.ours)
        return self.seen.decode()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    found = Terminal(monkeypatch)
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    yield found
    if not found.file.closed:
        found.text()


EVALUATION = {
    "accuracy": 0.5, "loss": 0.25, "margin": 1.0, "max_reward": 9.0, "mean_reward": 2.0, "auc": 0.75, "step_time": 3.0
}  # fmt: skip


@pytest.mark.parametrize(
    ("console", "eval_data", "metrics", "expected"),
    [
        (Console(), "a.jsonl", EVALUATION, "loss 0.2500  accuracy 0.5000  margin 1.000  mean_reward 2.000"),
        (
            Console(verbose=True),
            "a.jsonl",
            EVALUATION,
            "accuracy 0.5000  loss 0.2500  margin 1.000  max_reward 9.000  mean_reward 2.000  auc 0.7500",
        ),
        (
            Console(metrics=["auc", "max_reward"]),
            "a.jsonl",
            EVALUATION,
            "auc 0.7500  max_reward 9.000  accuracy 0.5000  loss 0.2500",
        ),
        (
            Console(),
            {"easy": "a.jsonl", "hard": "b.jsonl"},
            {f"{each}_{name}": x for each in ("easy", "hard") for name, x in EVALUATION.items()},
            "easy_loss 0.2500  easy_accuracy 0.5000  easy_margin 1.000  easy_mean_reward 2.000  "
            "hard_loss 0.2500  hard_accuracy 0.5000  hard_margin 1.000  hard_mean_reward 2.000",
        ),
    ],
)
def test_an_evaluation_has_the_four_metrics_that_matter(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    console: Console,
    eval_data: Any,
    metrics: dict[str, float],
    expected: str,
) -> None:
    stage = make_stage(tmp_path)
    console.rlhf_stage_start(stage=stage, config=TrainerConfig(eval_data=eval_data))
    console.rlhf_step_end(step=5, metrics={f"eval_{name}": x for name, x in metrics.items()})
    assert capsys.readouterr().err.splitlines()[-1] == f"[policy] eval 5  {expected}"


def test_what_an_action_alone_reports_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console, stage = Console(), make_stage(tmp_path)
    console.rlhf_stage_start(stage=stage, config=TrainerConfig())
    (stage.dir / "plan.json").write_text('{"updates": 40, "start": 0}')
    console.rlhf_step_end(step=5, metrics={"parameters/norm": 2.5})
    console.rlhf_step_end(step=10, metrics={"loss": 0.5, "parameters/norm": 2.25})
    console.rlhf_stage_end(error=None)
    _, alone, logged, _ = capsys.readouterr().err.splitlines()
    assert alone.startswith("[policy]  5/40  parameters/norm 2.500")
    assert logged.startswith("[policy] 10/40  loss 0.5000  ")


@pytest.mark.parametrize("progress", ["rich", "tqdm"])
def test_a_dumb_terminal_gets_plain_lines(
    tmp_path: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch, progress: Any
) -> None:
    terminal.attach()
    monkeypatch.setenv("TERM", "dumb")
    play(Console(progress=progress), make_stage(tmp_path))
    assert "\x1b" not in terminal.text()


@pytest.mark.parametrize("colour", [True, False])
def test_rich_fits_80_columns(
    tmp_path: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch, colour: bool
) -> None:
    if not colour:
        monkeypatch.setenv("NO_COLOR", "1")
    terminal.attach()
    metrics = {f"rewards/function_{i}/mean": i + 0.5 for i in range(8)}
    console, stage = Console(verbose=True), make_stage(tmp_path / "policy")
    console.rlhf_stage_start(stage=stage, config=TrainerConfig())
    (stage.dir / "plan.json").write_text('{"updates": 40}')
    console.rlhf_step_end(step=5, metrics=METRICS)
    console.rlhf_step_end(step=10, metrics=METRICS)
    assert console._view is not None
    console._view.bar.refresh()  # type: ignore[attr-defined]
    console.rlhf_step_end(step=10, metrics={f"eval_{k}": v for k, v in metrics.items()})
    console.rlhf_stage_end(error=None)
    text = terminal.text()
    assert bool(re.search(r"\x1b\[[\d;]*3\d", text)) is colour
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", text).replace("\r", "\n")
    lines = [line for line in plain.splitlines() if line.strip()]
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("policy ───")
    assert any("preparing" in line for line in lines)
    assert any(
        "━" in line and re.search(r"10/40  loss 0\.6931  reward 1\.250  12\.3k tok/s", line) for line in lines
    )
    assert re.search(r"compiled \d+ programs in [\d.]+ s", " ".join(lines))
    wrapped = [line for line in lines if "rewards/" in line]
    assert len(wrapped) == 4
    assert wrapped[0].lstrip().startswith("eval 10")
    assert all(line.index("rewards/") == wrapped[0].index("rewards/") for line in wrapped)
    assert "✓ 10 updates in 0:0" in lines[-1]
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is shown again


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Stopped("s"), r"■ stopped in 0:0\d, last logged update 20/40"),
        (KeyboardInterrupt(), "■ stopped"),
        (ValueError("v"), r"✗ failed in 0:0\d, last logged update 20/40"),
    ],
)
def test_rich_says_how_it_ended(tmp_path: Path, terminal: Terminal, error: BaseException, said: str) -> None:
    terminal.attach()
    play(Console(), make_stage(tmp_path), error)
    assert re.search(said, re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", terminal.text()))


def test_a_stage_that_stops_between_two_logged_updates_names_none_as_its_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console()
    console.rlhf_stage_start(stage=make_stage(tmp_path / "policy"), config=TrainerConfig())
    console.rlhf_stage_end(error=Stopped("stage 'policy': stopped after update 3"))
    assert re.fullmatch(r"\[policy\] stopped in 0:0\d", capsys.readouterr().err.splitlines()[-1])


def test_tqdm(tmp_path: Path, terminal: Terminal) -> None:
    terminal.attach()
    play(Console(progress="tqdm"), make_stage(tmp_path))
    text = terminal.text()
    assert "policy 20/40 |" in text
    assert "loss 0.3466  reward 1.250  12.3k tok/s" in text
    assert "[policy] eval 20  accuracy 0.9800" in text


@pytest.mark.parametrize("progress", ["rich", "tqdm"])
def test_control_characters_of_names_are_shown_and_not_obeyed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], progress: Any
) -> None:
    hostile, safe = "a\x1b]0;owned\x07b\x9b2Jc\rd\u202ee\x7ff", r"a\x1b]0;owned\x07b\x9b2Jc\rd\u202ee\x7ff"
    stage = dataclasses.replace(make_stage(tmp_path / hostile), name=hostile + "\ud800")
    console = Console(progress=progress)
    console.rlhf_stage_start(stage=stage, config=TrainerConfig())
    console.rlhf_artifact_saved(artifact=Artifact(hostile, "language_model", stage.dir))
    lines = capsys.readouterr().err.splitlines()
    assert [line.count(safe) for line in lines] == [2, 3]
    assert all(line.startswith(rf"[{safe}\ud800]") for line in lines)
    assert not [
        character for character in "\x1b\x9b\x07\u202e\x7f" if any(character in line for line in lines)
    ]


def test_json_is_an_object_an_event(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    play(Console(progress="json"), make_stage(tmp_path), Stopped("s"))
    out, err = capsys.readouterr()
    assert err == ""
    events = [json.loads(line, parse_constant=pytest.fail) for line in out.splitlines()]
    assert [e["event"] for e in events] == [
        "start",
        "step",
        "evaluation",
        "step",
        "evaluation",
        "saved",
        "end",
    ]
    assert {e["stage"] for e in events} == {"policy"}
    assert events[1]["updates"] == 40
    assert events[1]["kl"] is None
    assert events[1]["loss"] == 0.6931
    assert events[2]["eval_accuracy"] == 0.98
    assert (events[6]["how"], events[6]["step"]) == ("stopped", 20)


def test_every_process_writes_where_it_is_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The console stays the first process's; the others have files of their own, which a resumed run cuts, too."""
    stage = dataclasses.replace(make_stage(tmp_path, is_main=False), registry=plugins.load().registry)
    monkeypatch.setattr(jax, "process_index", lambda: 2)
    config = TrainerConfig(log_all_workers=True, logger=[{"name": "wandb", "mode": "offline"}])
    loggers = make_loggers(config, stage)
    assert list(loggers) == ["logger 'jsonl'", "logger 'wandb'"]
    for step in (1, 2):
        loggers["logger 'jsonl'"].rlhf_step_end(stage=stage, step=step, metrics={"loss": 0.5})
    assert [path.name for path in metric_files(tmp_path)] == [
        "metrics.jsonl",
        "weights.jsonl",
        "metrics-2.jsonl",
    ]
    cut_files(tmp_path, 1)
    (row,) = (tmp_path / "metrics-2.jsonl").read_text().splitlines()
    assert json.loads(row)["step"] == 1
    started: dict[str, Any] = {}
    fake = SimpleNamespace(
        init=lambda **given: started.update(given) or SimpleNamespace(dir=str(tmp_path)), Settings=dict
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    loggers["logger 'wandb'"].rlhf_stage_start(stage=stage, config=config)
    assert started["name"].endswith("-2")
    assert (tmp_path / "wandb_run_id-2.txt").is_file()


def test_a_console_without_a_plan_still_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    console.rlhf_stage_start(stage=make_stage(tmp_path), config=TrainerConfig())
    console.rlhf_step_end(step=7, metrics={"loss": 2.0})
    console.rlhf_stage_end(error=None)
    assert "[policy] 7  loss 2.000\n" in capsys.readouterr().err


def test_pace_is_of_the_recent_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    pace = Pace(tmp_path / "plan.json")
    (tmp_path / "plan.json").write_text('{"updates": 1000}')
    assert pace.seconds_left() is None
    now = 160.0  # a minute to compile
    pace.mark(510)  # a continued run
    assert pace.left() == ""
    now = 170.0
    pace.mark(520)
    assert pace.seconds_left() == pytest.approx(480.0)
    now = 175.0
    assert pace.left() == "7:55 left"
    assert pace.seconds() == 75.0
    assert pace.count() == " 520/1000"
    now = 1000.0  # later than the last update was expected
    assert pace.left() == "0:00 left"


def test_numbers_and_times() -> None:
    small, large = (0, 8, 0.01, 12.3, 999.96, 1234, 9999.4), (45_600, 999_960, 2.5e9, 1e-5, -0.5, 1e15)
    texts = "0 8.000 0.01000 12.30 1,000 1,234 9,999 45.6k 1.0M 2.5G 1.00e-05 -0.5000 1.00e+15 nan -inf"
    assert [number(x) for x in [*small, *large, math.nan, -math.inf]] == texts.split()
    assert [clock(s) for s in (0, 7.4, 59.6, 3599, 3723)] == ["0:00", "0:07", "1:00", "59:59", "1:02:03"]


def test_jsonl_rows_are_strict(tmp_path: Path) -> None:
    play(LOGGERS.get(LOGGER, "jsonl"), make_stage(tmp_path))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [row["step"] for row in rows] == [10, 10, 20, 20]
    assert list(rows[0])[:3] == ["step", "time", "loss"]
    assert rows[0]["kl"] is None
    assert rows[1]["eval_accuracy"] == 0.98
    assert rows[0]["time"] > 1.6e9


def chained(directory: Path) -> list[str]:
    """Each row's SHA-256 after the line of the one before, from the rows alone."""
    lines: list[str] = []
    for row in (directory / "metrics.jsonl").read_bytes().splitlines(keepends=True):
        before = f"{lines[-1]}\n".encode() if lines else b""
        lines.append(hashlib.sha256(before + row).hexdigest())
    return lines


def test_rows_are_chained_also_after_a_kill(tmp_path: Path) -> None:
    """Before a row, within one, between a row and its digest, within that; and in what an earlier version began."""
    rows, digests = tmp_path / "metrics.jsonl", tmp_path / "metrics.sha256"
    stage = make_stage(tmp_path)
    for step in range(1, 4):
        JSON_LINES.rlhf_step_end(stage, step, {"loss": 0.1 * step})
    whole, chain = rows.read_bytes(), digests.read_bytes()
    assert chain.decode().split() == chained(tmp_path)
    size = len(chain) // 3
    for lost in (0, 20, size, size + 20, len(chain)):
        rows.write_bytes(whole + b'{"step": 4, "lo')
        digests.write_bytes(chain[: len(chain) - lost])
        JSON_LINES.cut(rows, 3 - (lost == 20))
        JSON_LINES.rlhf_step_end(stage, 5, {"loss": 0.5})
        assert digests.read_text().split() == chained(tmp_path)
    rows.write_bytes(whole.replace(b"0.1", b"0.7"))
    digests.write_bytes(chain)
    JSON_LINES.cut(rows, 2)
    assert digests.read_text().split()[0] != chained(tmp_path)[0]


def test_cut_drops_later_rows_and_a_torn_line(tmp_path: Path) -> None:
    """Also one without its line end, and one in the middle, of which it tells."""
    path = tmp_path / "metrics.jsonl"
    JSON_LINES.cut(path, 5)
    assert not path.exists()
    rows = [json.dumps({"step": step, "loss": 0.5}) for step in (1, 2, 2, 3, 4)]
    path.write_text("\n".join(rows) + '\n{"step": 2, "lo')
    JSON_LINES.cut(path, 2)
    assert path.read_text() == "\n".join(rows[:3]) + "\n"
    JSON_LINES.cut(path, 0)
    assert path.read_text() == ""
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n{"step": 3, "loss": 12}')  # of 123, perhaps
    with pytest.warns(UserWarning, match=r"metrics\.jsonl line 2 is not a JSON object with a step; dropped"):
        JSON_LINES.cut(path, 9)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_what_is_printed_meanwhile_lands_above_the_bar(tmp_path: Path, terminal: Terminal) -> None:
    terminal.attach()
    console = Console()
    console.rlhf_stage_start(stage=make_stage(tmp_path), config=TrainerConfig())
    print("from a reward function", file=sys.stderr)
    console.rlhf_stage_end(error=None)
    assert sys.stderr is terminal.file
    assert "from a reward function" in terminal.text()


@pytest.mark.parametrize(
    ("logger", "is_main"),
    [
        (Console(), False),
        (Console("json"), False),
        (JSON_LINES, False),
        (LOGGERS.get(LOGGER, "wandb", mode="offline"), False),
        (Console("none"), True),
    ],
)
def test_only_the_main_process_writes_and_only_what_is_asked_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], logger: Any, is_main: bool
) -> None:
    play(logger, make_stage(tmp_path, is_main=is_main))
    assert capfd.readouterr() == ("", "")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
