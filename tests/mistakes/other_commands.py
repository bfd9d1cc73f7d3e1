"""`rlhf new`, `report`, `compare`, `data`, `export`, and `check` for other devices."""

from __future__ import annotations

from typing import Any

from tests.mistakes.mistake import file, typed
from tests.shared import report_runs


def full(place: Any) -> None:
    (place.path / "rlhf-full").mkdir()
    place.write("rlhf-full/notes", "mine")


def a_run(place: Any) -> None:
    report_runs.make_run(place.path / "one")
    (place.path / "empty").mkdir()


NEW = [
    typed("new polcy-loss steady"),
    typed("new policy-loss 'Steady Loss'"),
    typed("new reward short advantage"),
    typed("new reward short advantage short"),
    typed("new reward 2fast"),
    typed("new reward class"),
    typed("new policy-loss dapo"),
    typed("new logger grpo"),
    typed("new logger full", "a directory that is there", full),
    typed("new rewrad Über --dir pairs.jsonl"),
    typed("new trainer mine --data pair"),
    typed("new reward short --data pairs"),
    typed("new dpo-loss ipo"),
]
REPORTS = [
    typed("report nowhere"),
    typed("report pairs.jsonl"),
    typed("report empty", "a directory that is no run", a_run),
    typed("report one/rm", "the directory of a stage", a_run),
    typed("report one -o empty", "a page whose path is a directory", a_run),
    typed("compare one", "one run to compare", a_run),
]
DATA = [
    typed("data pair.jsonl"),
    file(
        "a cell that is null",
        "bad.jsonl",
        '{"prompt": "a", "chosen": null, "rejected": "b"}\n',
        "data bad.jsonl",
    ),
    file("columns that nothing reads", "bad.jsonl", '{"chosn": "a", "x": 1}\n', "data bad.jsonl"),
    typed("data pairs.jsonl --tokenizer a --model b"),
    typed("data pairs.jsonl --tokenizer ./tokenzier"),
]
EXPORTS = [
    typed("export model model"),
    typed("export model out --merge"),
    typed("export model out --untied"),
    typed("export modl out"),
]
DEVICES = [
    typed("check base.toml --on h10:8"),
    typed("check base.toml --on h100"),
    typed("check base.toml --on h100:0"),
    typed("check base.toml --on h100:8x"),
    typed("check base.toml --on h100:1x1x1x8"),
    typed("check base.toml --on v5e:16"),
    typed("check base.toml --on v5p:4x4"),
    typed("check base.toml --json"),
    typed("check base.toml --on h100:8 --devices 4"),
    typed("check base.toml --on h1000"),
    typed("check base.toml --on h100:8 --set mesh.fsdp=3"),
]
SECTIONS = {
    "New packages": NEW,
    "Reports": REPORTS,
    "Statistics of data": DATA,
    "Exports": EXPORTS,
    "Checks for other devices": DEVICES,
}
