"""The command line: exit codes, messages, what is imported, and `rlhf train`'s flags."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlhf_core import cli
from rlhf_core.cli import train
from rlhf_core.errors import InputError
from rlhf_core.stage import execute

FAKE_TRAINERS = Path(__file__).parents[2] / "shared" / "fake_trainers.py"


@pytest.fixture
def wide(rlhf: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run the command in this process, on a wide terminal."""
    monkeypatch.setenv("COLUMNS", "120")
    return rlhf


HELP = ["--help"], ["--version"], ["run", "--help"], ["train", "--help"], ["generate", "--help"]


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import json, sys\n"
        "from rlhf_core.cli import main\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    sys.argv = ['rlhf', *arguments]\n"
        "    try: main()\n"
        "    except SystemExit as stop: code = stop.code or 0\n"
        "    heavy = {'jax', 'numpy', 'transformers', 'datasets', 'wandb', 'flax', 'pluggy'}\n"
        "    heavy &= set(sys.modules)\n"
        "    print('IMPORTED', sorted(heavy), code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(HELP)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    told = [line for line in done.stdout.splitlines() if line.startswith("IMPORTED")]
    assert told == ["IMPORTED [] 0"] * len(HELP), done.stdout
    assert "\nrlhf 0.1.0\n" in done.stdout


OWN_CONSOLE = 'rm.logger=[{ name = "console", progress = "json" }]'


@pytest.mark.usefixtures("fake", "pipeline")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "p.toml", "--dir", "runs/a"], []),
        (
            ["run", "p.toml", "--dir", "runs/a", "--verbose", "--set", OWN_CONSOLE],
            [("rich", True), ("json", True), ("rich", True)],
        ),
        (["train", "fake", "--progress_bar_type", "tqdm", "--verbose"], [("tqdm", True)]),
        (["train", "fake", "--verbose", "false"], []),
    ],
)
def test_verbose_shows_every_metric(
    wide: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    expected: list[tuple[str, bool]],
) -> None:
    consoles: list[Any] = []
    plain = execute.make_loggers

    def spy(config: Any, stage: Any) -> dict[str, Any]:
        loggers = plain(config, stage)
        consoles.extend(each for name, each in loggers.items() if "console" in name and each.verbose)
        return loggers

    monkeypatch.setattr(execute, "make_loggers", spy)
    done = wide(*arguments, "--plugin", str(FAKE_TRAINERS))
    assert done.code == 0, done.message
    assert [(each.progress, each.verbose) for each in consoles] == expected


@pytest.mark.parametrize(
    ("fail", "code", "said"),
    [
        ("error", 1, "the fake trainer was told to fail"),
        ("stopped", 75, "stopped, state saved"),
        ("full", 1, "no space left on the disk while writing weights.txt"),
        ("broken disk", 1, "weights.txt: Input/output error; fix this and rerun the same command"),
        ("empty", 1, "there is no output 'model'"),
    ],
)
@pytest.mark.usefixtures("fake", "pipeline")
def test_exit_codes(wide: Callable[..., Any], fail: str, code: int, said: str) -> None:
    plugin = ["--plugin", str(FAKE_TRAINERS), "--dir", "runs/a", "--set", f"base.fail={fail}"]
    ended = wide("run", "p.toml", *plugin)
    assert ended.code == code
    assert said in ended.message


def test_why_a_plugin_failed_is_said_where_it_is_used(
    pipeline: Path,
    fake: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rlhf: Callable[..., Any],
) -> None:
    info = tmp_path / "site" / "rlhf_brk-0.3.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlhf-brk\nVersion: 0.3.0\n")
    (info / "entry_points.txt").write_text("[rlhf]\nbrk = made_up_that_is_not_there\n")
    monkeypatch.syspath_prepend(info.parent)
    pipeline.write_text(pipeline.read_text().replace('trainer = "fake"', 'trainer = "brk"'))
    for command in ("check", "run"):
        ended = rlhf(command, "p.toml", "--plugin", str(FAKE_TRAINERS), "--dir", "runs/a")
        assert ended.code == 2
        assert ended.warned.count("No module named 'made_up_that_is_not_there'") == 1
        lines = ended.message.splitlines()
        assert [line.split(":")[0] for line in lines] == ["stage 'base'.trainer", "stage 'policy'.trainer"]
        assert all("No module named 'made_up_that_is_not_there'" in line for line in lines)


def test_markup_in_messages_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise InputError("stage 'a'.rewards[0].model: [bold]odd[/bold]")

    monkeypatch.setattr("rlhf_core.cli.program.app", fail)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err == "stage 'a'.rewards[0].model: [bold]odd[/bold]\n"


def test_a_traceback_drives_no_terminal_and_holds_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        try:
            raise ConnectionError("\x1b[2J refused canary-key")
        except ConnectionError as error:
            raise KeyError("\x9b") from error

    monkeypatch.setenv("JUDGE_API_KEY", "canary-key")
    monkeypatch.setattr("rlhf_core.cli.program.app", fail)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last)")
    assert r"\x1b[2J refused **********" in err
    assert "\x1b" not in err


@pytest.mark.parametrize("arguments", [["\x1b[2J"], ["run", "--\x9b2J"], ["check", "a", "\x1b]0;x\x07"]])
def test_usage_errors_are_shown_like_other_messages(rlhf: Callable[..., Any], arguments: list[str]) -> None:
    ended = rlhf(*arguments)
    assert ended.code == 2
    assert ended.message.startswith("Usage: ")
    assert r"\x" in ended.message
    assert not set(ended.message) & set("\x1b\x9b\x07")


def test_what_libraries_log_is_shown_like_other_messages(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        try:
            raise ValueError("canary-token")
        except ValueError:
            logging.getLogger("a").exception("%s\x1b[2J", "canary-token")

    monkeypatch.setenv("HF_TOKEN", "canary-token")
    monkeypatch.setattr("rlhf_core.cli.program.app", fail)
    before = logging.getLogRecordFactory()
    try:
        with pytest.raises(SystemExit):
            cli.main()
    finally:
        logging.setLogRecordFactory(before)
    assert caplog.messages == [r"**********\x1b[2J"]
    assert "ValueError: *" in caplog.text
    assert "canary" not in caplog.text


def test_a_reader_that_is_gone_gets_no_message(
    rlhf: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `rlhf plugins | head -1`."""

    def write(*_: Any, **__: Any) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))  # typer replaces them
    monkeypatch.setattr("rlhf_core.cli.extensions.with_commands", write)
    ended = rlhf("plugins")
    assert (ended.code, ended.message, ended.out) == (1, "", "")


@pytest.mark.usefixtures("fake")
def test_code_that_exits_is_a_failure_with_its_place(pipeline: Path, rlhf: Callable[..., Any]) -> None:
    Path("quits.py").write_text(
        "import sys\n"
        "from rlhf_core import LOGGER, hookimpl\n"
        "class Quits:\n"
        "    @hookimpl\n"
        "    def rlhf_stage_start(self):\n"
        "        sys.exit(9)\n"
        "@hookimpl\n"
        "def rlhf_register(registry):\n"
        "    registry.add(LOGGER, 'quits', Quits)\n"
    )
    chosen = (
        "--dir",
        "run",
        "--plugin",
        str(FAKE_TRAINERS),
        "--plugin",
        "quits.py",
        "--set",
        "base.logger=['quits']",
    )
    ended = rlhf("run", str(pipeline), *chosen)
    place = rf"\({re.escape(str(Path('quits.py').resolve()))} line 6\)"
    assert ended.code == 1
    assert re.fullmatch(
        rf"code that the command called raised SystemExit: 9 {place}; raise an exception instead",
        ended.message,
    )


@pytest.mark.usefixtures("fake")
def test_plugins_as_json(wide: Callable[..., Any]) -> None:
    ended = wide("plugins", "--json", "--plugin", str(FAKE_TRAINERS))
    assert ended.code == 0, ended.message
    listed: dict[str, Any] = {each["name"]: each for each in json.loads(ended.out)}
    core = listed["core"]
    assert core["distribution"] == "rlhf-core"
    assert core["version"] == "0.1.0"
    assert core["state"] == "loaded"
    assert set(core["components"]["optimizer"]) == {"adamw", "adafactor", "lion", "muon", "sgd"}
    assert {"length", "exact_match"} <= set(listed["rewards"]["components"]["reward"])
    assert set(core["components"]["logger"]) == {"console", "jsonl"}
    assert "wandb" in listed["trackers"]["components"]["logger"]
    assert {"jsonl", "json", "csv", "parquet", "arrow", "hub"} <= set(core["components"]["dataset"])
    assert core["components"]["model"] == ["decoder"]
    assert listed["grpo"]["state"] == "disabled"
    assert listed[str(FAKE_TRAINERS)]["components"]["trainer"] == ["fake", "fake_rm"]
    table = wide("plugins", "--plugin", str(FAKE_TRAINERS))
    assert "optimizer: adafactor, adamw" in table.out


def of_flags(fake: ModuleType, *arguments: str) -> Any:
    file = train.pipeline_from_flags("fake", fake.FakeConfig, list(train._flags(arguments)))
    assert not file.problems
    return file


def test_a_run_s_directory_has_its_name(fake: ModuleType, tmp_path: Path) -> None:
    named = ("--trainer_prefix", "a", "--model_name", "b c/d")
    for given, found in (
        ((), "runs/fake"),
        (("--save_directory", "x"), "x"),
        (named, "runs/fake/a-b-c-d"),
        ((*named, "--save_directory", "x"), "x/a-b-c-d"),
        ((*named, "--dir", "y"), "y"),
    ):
        assert of_flags(fake, *given).dir == tmp_path / found
    assert of_flags(fake, "--dir", "x", "--mesh.fsdp", "2").mesh == {"fsdp": 2}


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["--learning-rate", "1e-3"], {"learning_rate": 1e-3}),
        (["--learning_rate=1e-3"], {"learning_rate": 1e-3}),
        (["--use_wandb", "--size", "4"], {"use_wandb": True, "size": 4}),
        (["--shuffle_train_dataset", "false"], {"shuffle_train_dataset": False}),
        (
            ["--loss", "fake_loss", "--loss.temperature", "2.0"],
            {"loss": {"name": "fake_loss", "temperature": 2.0}},
        ),
        (
            ["--loss.temperature", "2.0", "--loss", "fake_loss"],
            {"loss": {"name": "fake_loss", "temperature": 2.0}},
        ),
        (["--rewards", "length"], {"rewards": ["length"]}),
        (["--rewards", "length", "--rewards", "exact_match"], {"rewards": ["length", "exact_match"]}),
        (["--rewards", '[{ name = "length", target = 4 }]'], {"rewards": [{"name": "length", "target": 4}]}),
        (
            ["--repo_id", "org/model", "--dataset-name", "org/data"],
            {"repo_id": "org/model", "dataset_name": "org/data"},
        ),
        (["--weight_decay", "-1"], {"weight_decay": -1}),
        (["--seed", "3"], {"seed": 3}),
    ],
)
def test_flag_spellings(fake: ModuleType, arguments: list[str], options: dict[str, Any]) -> None:
    assert of_flags(fake, *arguments).stages[0] == {"name": "fake", "trainer": "fake", **options}


def test_the_help_of_a_trainer_is_toml_with_bounds(
    fake: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    train.train("fake", ["--plugin", str(FAKE_TRAINERS), "--help"])
    shown = capsys.readouterr().out
    assert "bytes of the model" in shown
    lines = shown.splitlines()
    told = {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line.startswith("--")}
    assert told["--size"] == "whole number, ≥ 1; 3"
    assert told["--optimizer"] == 'optimizer; "adamw"'
    assert told["--rewards"] == "list of reward; []"
    assert told["--eval_on_start"] == "true or false; false"
    assert told["--max_grad_norm"] == "number | none, ≥ 0; 1.0"


def test_a_shell_completes_commands_and_flags() -> None:
    """Also those of other distributions, as a shell asks for them."""
    asked = {"rlhf de": {"demo"}, "rlhf demo --sh": {"--shuffle-labels"}}
    for words, expected in asked.items():
        variables = {
            "_RLHF_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
        }
        done = subprocess.run(
            [Path(sys.executable).with_name("rlhf")],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
        )
        assert (set(done.stdout.split()), done.stderr) == (expected, "")
