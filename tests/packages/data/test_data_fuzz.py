"""Damaged files are either read or rejected with a single InputError."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from rlhf_core import data
from rlhf_core.errors import InputError

MUTATIONS = 50
ROWS = [
    {"prompt": "a, b", "chosen": 'c "d"', "rejected": "é\u2028", "margin": 0.5, "tools": None},
    {"prompt": "q", "chosen": "x", "rejected": "y", "margin": None, "tools": "[]"},
    {"prompt": "line\nline", "chosen": "x" * 50, "rejected": "\\u0041", "margin": -1.0, "tools": "[{}]"},
]
PIECES = [
    b"",
    b"\0",
    b"\xff",
    b"\xef\xbb\xbf",
    b'"',
    b",",
    b"\n",
    b"\r",
    b"{",
    b"[" * 3000,
    b"\\ud800",
    b"1" * 5000,
]
PIECES += [b"null", b"NaN", b"1e999", b"-", b"}", b'"prompt"', b"\x00\x00\x00\x7f"]


def written(path, kind):
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS), encoding="utf-8")
    elif kind == "csv":
        pd.DataFrame(ROWS).to_csv(path, index=False)
    else:
        pd.DataFrame(ROWS).to_parquet(path)
    return path.read_bytes()


def mutated(content, draw):
    """Overwrite, delete, duplicate or insert bytes in one to three places."""
    for _ in range(draw.integers(1, 4)):
        at, end = sorted(draw.integers(0, len(content) + 1, 2).tolist())
        end = min(end, at + 40)
        piece = PIECES[draw.integers(len(PIECES))]
        match draw.integers(5):
            case 0:
                content = content[:at] + piece + content[at:]
            case 1:
                content = content[:at] + piece + content[end:]
            case 2:
                content = content[:at] + content[at:end] * 2 + content[end:]
            case 3:
                content = content[:at]
            case _:
                content = content[:at] + draw.bytes(1) + content[at + 1 :]
        content = content or b"\n"
    return content


@pytest.mark.parametrize("held", [True, False], ids=["in memory", "on the disk"])
@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_damaged_files_are_rows_or_one_message(kind, held, tokenizer, tmp_path, in_memory):
    in_memory(1 << 23 if held else 0)
    path = tmp_path / f"a.{kind}"
    whole, draw = written(path, kind), np.random.default_rng(7)
    read = refused = 0
    for number in range(MUTATIONS):
        content = mutated(whole, draw)
        path.write_bytes(content)
        try:
            records = data.load(path)
            rows = list(records)
            assert [records[i] for i in range(len(records))] == rows or "nan" in str(rows).lower()
            read += 1
            data.encode_pairs(records, tokenizer, max_length=None)
        except InputError as error:
            refused += bool(str(error).strip())
        except Exception as error:
            pytest.fail(f"mutation {number}: {type(error).__name__}: {error} of {content!r}"[:2000])
    assert refused > 3
    assert kind == "parquet" or read > 3
