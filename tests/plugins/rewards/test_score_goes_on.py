"""`rlhf score` in parts: interrupted and resumed, it writes the same as in one go."""

from __future__ import annotations

import errno
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rlhf_core import RunError, load_model, scoring
from rlhf_core.data import whole_sequences
from rlhf_core.scoring import Scorer


@pytest.fixture(scope="module")
def model(tiny, tmp_path_factory):
    path = tmp_path_factory.mktemp("rm")
    tiny.make_model("score", scale=4.0).save(path)
    return path


@pytest.fixture
def rows(tiny, tmp_path, monkeypatch):
    for module in (whole_sequences, scoring):
        monkeypatch.setattr(module, "CHUNK", 3)
    return tiny.write_rows(tmp_path / "pairs.jsonl", tiny.pairs(11))


@pytest.fixture
def calls(monkeypatch):
    """Record the calls of `score_ids`, and interrupt call number `calls.stop`."""

    class Calls(list):
        stop = None

    calls, real = Calls(), Scorer.score_ids

    def score_ids(self, sequences, **options):
        if len(calls) == calls.stop:
            raise RunError("the device is gone")
        calls.append(len(sequences))
        return real(self, sequences, **options)

    monkeypatch.setattr(Scorer, "score_ids", score_ids)
    return calls


@pytest.fixture
def score(rlhf):
    """(model, file, output, further arguments) → how `rlhf score` ends."""

    def score(model, file, output, *more):
        return rlhf("score", str(model), str(file), "-o", str(output), *more)

    return score


def left(directory):
    return sorted(path.name for path in directory.iterdir() if path.name != "pairs.jsonl")


def test_a_link_and_a_pipe_are_written_to_and_not_replaced(model, rows, tmp_path, score):
    score(model, rows, tmp_path / "whole.jsonl")
    whole = (tmp_path / "whole.jsonl").read_bytes()
    target, link, pipe = (tmp_path / name for name in ("target.jsonl", "link.jsonl", "pipe"))
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    score(model, rows, link)
    assert link.is_symlink()
    assert (target.read_bytes(), target.stat().st_mode & 0o777) == (whole, 0o640)
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as pool:
        read = pool.submit(pipe.read_bytes)
        score(model, rows, pipe)
        assert read.result() == whole
    assert pipe.is_fifo()
    assert left(tmp_path) == ["link.jsonl", "pipe", "target.jsonl", "whole.jsonl"]


def test_an_interrupted_run_resumes_to_the_same_bytes(model, rows, calls, tmp_path, score):
    said = score(model, rows, tmp_path / "whole.jsonl").out
    assert calls == [6, 6, 6, 4]
    assert left(tmp_path) == ["whole.jsonl"]
    for stop in (0, 1, 3):
        calls.clear()
        calls.stop = stop
        assert score(model, rows, tmp_path / "parts.jsonl").code
        assert not (tmp_path / "parts.jsonl").exists()
        (tmp_path / ".parts.jsonl.unfinished").open("ab").write(b'{"half a li')
        calls.clear()
        calls.stop = None
        told = score(model, rows, tmp_path / "parts.jsonl")
        assert len(calls) == 4 - stop
        assert (f"resuming after {3 * stop} rows" in told.message) == (stop > 0)
        assert told.out == said
        assert (tmp_path / "parts.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
        (tmp_path / "parts.jsonl").unlink()
        assert left(tmp_path) == ["whole.jsonl"]
    assert len((tmp_path / "whole.jsonl").read_text().splitlines()) == 11


def test_other_rows_or_settings_begin_anew(model, rows, calls, tiny, tmp_path, score):
    calls.stop = 2
    assert score(model, rows, tmp_path / "out.jsonl").code
    tiny.write_rows(rows, tiny.pairs(11, seed=3))
    calls.clear()
    calls.stop = None
    score(model, rows, tmp_path / "out.jsonl")
    assert len(calls) == 4
    found = [json.loads(line)["prompt"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert found == [row["prompt"] for row in tiny.pairs(11, seed=3)]


def test_layers_in_few_bits_give_the_scores_of_their_values(model, rows, calls, tiny, tmp_path, score):
    """Those of the model that they are dequantized to, also for rows that were begun in float32."""
    load_model(model, "score", mesh=tiny.one_device(), quantized="int8").merged().save(tmp_path / "values")
    calls.stop = 2
    assert score(model, rows, tmp_path / "held.jsonl").code
    calls.stop = None
    score(model, rows, tmp_path / "held.jsonl", "--quantize", "int8")
    for name in ("values", "plain"):
        score(tmp_path / name if name == "values" else model, rows, tmp_path / f"{name}.jsonl")
    held, values, plain = (
        np.array([[row["chosen_score"], row["rejected_score"]] for row in map(json.loads, file.open())])
        for file in (tmp_path / f"{name}.jsonl" for name in ("held", "values", "plain"))
    )
    np.testing.assert_allclose(held, values, atol=1e-5 * np.abs(values).max())
    assert np.abs(held - plain).max() > 1e-3 * np.abs(plain).max()


def test_all_rows_are_checked_before_the_first_is_scored(model, rows, calls, tiny, tmp_path, score):
    tiny.write_rows(rows, [*tiny.pairs(10), {"prompt": "a", "chosen": 3, "rejected": "b"}])
    assert "row 11: 'chosen' is a number" in score(model, rows, tmp_path / "out.jsonl").message
    assert calls == []


@pytest.mark.parametrize("failing", ["fsync", "replace", "mkdir"])
def test_what_the_disk_refuses_names_the_output(model, rows, tmp_path, monkeypatch, score, failing):
    output = tmp_path / "new" / "out.jsonl"

    def fails(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patches:
        patches.setattr(os, failing, fails)
        said = score(model, rows, output).message
    assert re.search(rf"out.jsonl\S* could not be written to {output.parent}\S+: Input", said)
    score(model, rows, output)
    score(model, rows, output)
    assert len(output.read_text().splitlines()) == 11
    assert os.listdir(output.parent) == ["out.jsonl"]


@pytest.fixture
def interrupted(model, rows, calls, tmp_path, score):
    """{"rows" or "state": the file of a command that was interrupted after two parts}."""
    calls.stop = 2
    assert score(model, rows, tmp_path / "out.jsonl").code
    calls.clear()
    calls.stop = None
    kept, state = sorted(tmp_path.glob(".out.jsonl*"))
    return {"rows": kept, "state": state}


def others(*damages):
    """Of the same kind as the first one, which `make test` tries."""
    return [pytest.param(damage, marks=pytest.mark.long) for damage in damages]


@pytest.mark.parametrize("damage", [b"7", *others(b"\xff", b"[" * 9000, b"null")])
def test_damaged_rows_of_an_interrupted_run_are_an_error_that_names_their_file(
    model, rows, calls, tmp_path, score, interrupted, damage
):
    content = interrupted["rows"].read_bytes()
    interrupted["rows"].write_bytes(content[:10] + damage + content[10 + len(damage) :])
    said = score(model, rows, tmp_path / "out.jsonl").message
    assert ".out.jsonl.unfinished is damaged: delete it to score all rows" in " ".join(said.split())
    interrupted["rows"].unlink()
    assert score(model, rows, tmp_path / "out.jsonl").code == 0
    assert len(calls) == 4


@pytest.mark.parametrize("damage", [None, b"[]", *others(b'{"parts": 1}', b"null", b"\xff", b"[" * 9000)])
def test_a_damaged_state_of_an_interrupted_run_begins_anew(
    model, rows, calls, tmp_path, score, interrupted, damage
):
    content = interrupted["state"].read_bytes()
    assert b'"parts": 2' in content
    changed = content.replace(b'"parts": 2', b'"parts": 3') if damage is None else damage
    interrupted["state"].write_bytes(changed)
    assert score(model, rows, tmp_path / "out.jsonl").code == 0
    assert len(calls) == 4
