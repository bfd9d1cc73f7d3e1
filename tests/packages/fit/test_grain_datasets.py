"""Datasets of grain: finite ones are read in any order, others by their own iterators, which continue."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import grain
import numpy as np
import pytest

from rlhf_core import data
from rlhf_core.config import TrainerConfig
from rlhf_core.data import Source
from rlhf_core.data.streams import open_source, open_streams
from rlhf_core.errors import InputError, RunError
from rlhf_core.fit import ExampleUpdates, Update, choose_row_layout
from rlhf_core.tokenizer import TextOptions

COUNT = 900
UPDATES = 9


@pytest.fixture(autouse=True)
def short(in_small_blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_core.data.streams.HEAD", 10)


@pytest.fixture(scope="module")
def tokenizer(tiny: ModuleType) -> Any:
    return tiny.make_tokenizer()


class Rows:
    """Pairs that tell which of them were read."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        self.read.append(int(i))
        return {**self.rows[i], "number": int(i)}

    def __repr__(self) -> str:
        return "rows of a test"


def made(count: int = COUNT) -> Rows:
    letters = "abcdefghij"
    rows = []
    for i in range(count):
        prompt = " ".join(letters[int(digit)] for digit in str(i))
        rows.append({"prompt": prompt, "chosen": " A" + " B" * (i % 7), "rejected": " C"})
    return Rows(rows)


def is_kept(row: dict[str, Any]) -> bool:
    return bool(row["number"] % 3)


def endless(rows: Rows) -> grain.MapDataset[Any]:
    return grain.MapDataset.source(rows).seed(7).shuffle().filter(is_kept).repeat(None)


def mixed(rows: Rows) -> grain.IterDataset[Any]:
    first = grain.MapDataset.source(rows).shuffle(seed=1).repeat(None).to_iter_dataset()
    second = grain.MapDataset.source(rows)[: COUNT // 3].repeat(None).to_iter_dataset()
    return grain.IterDataset.mix([first, second], [0.75, 0.25])


def iterated(rows: Rows) -> grain.IterDataset[Any]:
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return grain.MapDataset.source(rows).shuffle(seed=2).to_iter_dataset(options).filter(is_kept)


def loader(rows: Rows) -> grain.DataLoader:
    sampler = grain.samplers.IndexSampler(
        num_records=len(rows),
        shuffle=True,
        seed=3,
        num_epochs=None,
        shard_options=grain.sharding.NoSharding(),
    )
    return grain.DataLoader(data_source=rows, sampler=sampler)


KINDS = {"endless": endless, "mixed": mixed, "iterated": iterated, "loader": loader}


def updates(opened: Source, tiny: ModuleType) -> ExampleUpdates:
    config = TrainerConfig(total_batch_size=5, max_training_steps=UPDATES)
    layout = choose_row_layout(opened.trees, config, tiny.one_device(), 16, reads_tokens=False)
    return ExampleUpdates(opened, config, layout, vocabulary=1000, sequence_names=("margin",), group=2)


def opened(spec: Any, tokenizer: Any, workers: int = 0) -> Source:
    encode = partial(data.encode_pairs, max_length=64, chat_template=TextOptions())
    return open_source(open_streams(spec), encode, tokenizer, seed=5, window=100, workers=workers)


def contents(update: Update) -> list[bytes]:
    used = [batch.example[batch.example >= 0] for batch in update.batches]
    names = [update.where(i) for i in np.unique(np.concatenate(used)).tolist()]
    return [batch.rows.tokens.tobytes() for batch in update.batches] + [name.encode() for name in names]


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_goes_on_with_the_next_row(kind: str, tiny: ModuleType, tokenizer: Any) -> None:
    """The rows that updates had are not read again; those of the sample are, since layouts are chosen from them."""
    whole = updates(opened(KINDS[kind](made()), tokenizer), tiny)
    expected, positions = [], []
    for step in range(UPDATES):
        positions.append(json.loads(json.dumps(whole.snapshot(step)[0])))
        expected.append(contents(whole.update(step)))
    assert len({name for each in expected for name in each}) > 2 * UPDATES
    for killed, workers in [(1, 0), (4, 2 if kind == "endless" else 0), (8, 0)]:
        rows = made()
        rest = updates(opened(KINDS[kind](rows), tokenizer, workers), tiny)
        rest.restore(killed, positions[killed], {})
        rows.read.clear()
        assert [contents(rest.update(step)) for step in range(killed, UPDATES)] == expected[killed:]
        in_order = first_rows(kind)
        # Each part of a mix has a row of its own.
        used = in_order[: 5 * killed] if kind != "mixed" else []
        assert not set(used) & set(rows.read)
        # Reading ahead is the dataset's.
        assert set(in_order[5 * killed : 5 * UPDATES]) <= set(rows.read)


def first_rows(kind: str) -> list[int]:
    """The rows that updates use, in the order of the dataset's own iterator."""
    found = iter(KINDS[kind](made()))
    return [next(found)["number"] for _ in range(5 * UPDATES)]


def test_rows_keep_the_order_of_a_dataset_that_shuffles_them_itself(tiny: ModuleType, tokenizer: Any) -> None:
    rows = made()
    drawn = opened(endless(rows), tokenizer).next(30)
    expected = [rows.rows[i]["chosen"] for i in first_rows("endless")[:30]]
    assert [len(example.tree.branches[0]) for example in drawn] != sorted(map(len, expected))
    told = [tokenizer.decode(example.tree.branches[0]).count("B") for example in drawn]
    assert told == [text.count("B") for text in expected]
    assert [example.where for example in drawn[:2]] == ["dataset row 1", "dataset row 2"]
    assert [example.row for example in drawn] == list(range(30))


def test_a_dataset_that_ends_begins_again(tiny: ModuleType, tokenizer: Any) -> None:
    drawn = opened(iterated(made(12)), tokenizer).next(20)
    assert [example.where for example in drawn] == [f"dataset row {1 + i % 8}" for i in range(20)]


@pytest.mark.parametrize("kept", [100, 5])
def test_a_finite_dataset_is_read_once(
    kept: int, tiny: ModuleType, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a large one are read again when they are encoded, and not kept."""
    monkeypatch.setattr("rlhf_core.data.records.KEPT", kept)
    rows = made(30)
    records = data.load(grain.MapDataset.source(rows).filter(is_kept))
    assert rows.read == list(range(30))
    assert [records.where(i) for i in (0, 1, 2)] == [f"dataset row {n}" for n in (2, 3, 5)]
    again = list(records)
    assert [row["number"] for row in again] == [i for i in range(30) if i % 3]
    assert len(rows.read) == 30 + (20 if kept == 5 else 0)
    same = data.load(made(30).rows)
    assert records.fingerprint != same.fingerprint


def test_what_is_wrong_in_a_dataset_is_named(tiny: ModuleType, tokenizer: Any) -> None:
    def fails(row: dict[str, Any]) -> dict[str, Any]:
        if row["number"] == 40:
            raise ValueError("the disk is gone")
        return row

    rows = iterated(made()).map(fails)
    with pytest.raises(RunError, match=r"dataset, after row \d+: raised ValueError: the disk is gone"):
        opened(rows, tokenizer).next(COUNT)
    with pytest.raises(InputError, match="dataset row 1 is int, not a mapping of columns"):
        open_streams(grain.MapDataset.range(10).repeat(None))


def test_the_stage_needs_a_length_and_continues(tiny: ModuleType, tmp_path: Path) -> None:
    from rlhf_reward import RewardConfig, RewardTrainer

    rows = endless(made())
    config = RewardConfig(total_batch_size=4, save_directory=tmp_path / "a", save_steps=1)
    with pytest.raises(InputError, match=r"max_training_steps: missing; train_data is a stream"):
        RewardTrainer(config, model=tiny.make_model("score"), train_dataset=rows).train()
