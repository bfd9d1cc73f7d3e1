"""benchmarks/accelerator: every part runs at tiny sizes, is ended in time, and stands beside its prediction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from rlhf_core.plugins import load_file

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "accelerator"


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.syspath_prepend(str(FOLDER.parent / "speed"))
    return FOLDER


def run(folder: Path, out: Path, *arguments: str) -> list[dict[str, Any]]:
    load_file(folder / "run.py").main(["--tiny", "--out", str(out), *arguments])
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def test_attention_is_compared_with_dense_float32(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heading, *rows = run(folder, tmp_path / "rows.jsonl", "--parts", "attention")
    assert heading["versions"]["jax"] == jax.__version__
    dense, *others = rows
    assert dense["name"] == "xla 16"
    assert 0 < dense["error"] < 0.02
    assert 0 < dense["gradient_error"] < 0.02
    assert min(dense["seconds"], dense["forward_seconds"], dense["memory_analysis_bytes"]) > 0
    assert all("error" in row or "skipped" in row for row in others)  # there is no GPU here
    assert capsys.readouterr().out.count("\n") == 1 + len(rows)


@pytest.mark.long
def test_every_part_runs(folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    shared = request.getfixturevalue("shared")
    rows = run(folder, tmp_path / "rows.jsonl", "--golden", str(shared / "golden"), "--seconds", "3000")
    by_name = {row["name"]: row for row in rows}
    failed = {name: row["error"] for name, row in by_name.items() if isinstance(row.get("error"), str)}
    assert set(failed) <= {"cudnn 16", "pallas 16"}
    assert {"W1 50m", "W2 50m", "W3 50m", "W4 50m", "decode 4", "LoRA", "logits of llama"} <= set(by_name)
    assert all(row["passed"] for row in rows if "passed" in row)
    assert sum("passed" in row for row in rows) >= 14  # families, and resuming twice


@pytest.mark.long
def test_what_is_predicted_has_the_names_of_what_runs(folder: Path) -> None:
    written = load_file(folder / "predict.py").predict(
        ["h200:1", "h100:1"], "", devices=jax.devices()[:1], tiny=True
    )
    stages = written["h200"]["stages"]
    assert {"W1 50m", "W2 50m", "W3 50m", "decode 4", "LoRA", "xla 16"} <= set(stages)
    assert all(program["error"] is None for stage in stages.values() for program in stage["programs"])
    slower, faster = (written[chip]["stages"]["decode 4"]["programs"][0] for chip in ("h100", "h200"))
    assert slower["seconds"] > faster["seconds"]
    assert written["h100"]["compiled_for"] == "h200:1"


def test_the_layout_of_attention_is_a_prompt_and_its_completions(folder: Path) -> None:
    programs, sizes = load_file(folder / "programs.py"), load_file(folder / "sizes.py")
    bench = programs.Bench(sizes.TINY, mesh=None)
    positions, until = programs.Heads(bench, 16, "xla").layout()
    assert positions.shape == (2, 16)
    np.testing.assert_array_equal(positions[0], [0, 1, 2, 3, *[4, 5, 6, 7] * 3])
    np.testing.assert_array_equal(until[0], [16] * 4 + [8] * 4 + [12] * 4 + [16] * 4)


def test_a_row_stands_beside_its_prediction_and_survives_a_stop(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, out = load_file(folder / "run.py"), tmp_path / "rows.jsonl"
    predicted = {
        "W1 50m": {
            "programs": [{"calls": 2, "seconds": 0.5, "peak": 3e9}, {"calls": 1, "seconds": 1, "peak": 1e9}]
        }
    }
    results = script.Results(out, predicted)
    results.add(
        {"name": "W1 50m", "seconds": 4.0, "mfu": 0.5, "memory_analysis_bytes": 2e9, "peak_bytes": None}
    )
    row = json.loads(out.read_text())
    assert (row["expected_seconds"], row["expected_bytes"]) == (2.0, 3e9)
    results.add({"name": "decode", "error": "out of memory"})
    first, second = capsys.readouterr().out.splitlines()
    assert " ".join(first.split()) == "W1 50m seconds 4 at least 2 MFU 0.5 memory GB 2 expected 3"
    assert " ".join(second.split()) == "decode failed: out of memory"


def test_a_part_is_ended_when_its_time_is_up(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, out = load_file(folder / "run.py"), tmp_path / "rows.jsonl"
    sleeper = tmp_path / "sleeper.py"
    sleeper.write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(script, "__file__", str(sleeper))
    given = script.argparse.Namespace(out=out, golden=None, tiny=False)
    script.start_part("decode", given, 0.5)
    assert json.loads(out.read_text())["error"] == "stopped after 0 seconds"


def test_predictions_of_one_compiler_are_kept(folder: Path, tmp_path: Path) -> None:
    predict, file = load_file(folder / "predict.py"), tmp_path / "predicted.json"
    made = {"compiled_for": "h200:1", "compiler": {"jax": "0.10.2"}}
    for stages in ({"W1": 1, "W2": 2}, {"W2": 3}):
        predict.merge(file, {**made, "stages": stages})
    assert json.loads(file.read_text())["stages"] == {"W1": 1, "W2": 3}
    predict.merge(file, {**made, "compiler": {"jax": "0.11.2"}, "stages": {"W3": 4}})
    assert json.loads(file.read_text())["stages"] == {"W3": 4}


def test_committed_predictions_are_of_programs_that_compiled() -> None:
    files = sorted(FOLDER.glob("predicted_*.json"))
    assert [file.stem for file in files] == ["predicted_h100", "predicted_h200"]
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        assert found["compiled_for"] == "h200:1"
        assert found["on"] == f"{found['chip']['name']}:1"
        assert "W1 50m" in found["stages"]
        programs = [program for stage in found["stages"].values() for program in stage["programs"]]
        assert all(program["error"] is None for program in programs)
