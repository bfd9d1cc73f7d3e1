"""The order of rows: complete epochs, the same from any start."""

from __future__ import annotations

import itertools

import grain
import numpy as np
import pytest

from rlhf_core.data import batch_order, batch_rows, count_examples, count_updates, visited_rows


def take(n, *args, **kwargs):
    return [batch.tolist() for batch in itertools.islice(batch_rows(*args, **kwargs), n)]


@pytest.mark.parametrize("start", [3, *(pytest.param(start, marks=pytest.mark.long) for start in (0, 1, 7))])
def test_batches_do_not_depend_on_where_the_run_started(start):
    whole = take(9, 10, 4, seed=3)
    assert take(9 - start, 10, 4, seed=3, start=start) == whole[start:]


@pytest.mark.parametrize("few", [batch_order.FEW_ROWS, 0], ids=["few", "many"])
def test_the_order_is_that_of_a_grain_pipeline(few, monkeypatch):
    monkeypatch.setattr(batch_order, "FEW_ROWS", few)
    examples = grain.MapDataset.source(range(7)).seed(5).shuffle().repeat(None)
    assert take(6, 7, 5, seed=5, start=2) == [
        [examples[i] for i in range(k, k + 5)] for k in range(10, 40, 5)
    ]


def test_epochs_are_complete_and_reshuffled_and_the_last_batch_takes_what_is_left():
    flat = np.concatenate([np.array(batch) for batch in take(10, 10, 3, seed=0)])
    epochs = flat.reshape(3, 10)
    assert (np.sort(epochs) == np.arange(10)).all()
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 3
    assert take(3, 10, 3, seed=1) != take(3, 10, 3, seed=0)

    batches = take(99, 5, 4, seed=0, epochs=3)
    assert [len(batch) for batch in batches] == [4, 4, 4, 3]
    assert len(batches) == count_updates(5, 4, 3)
    assert sorted(itertools.chain(*batches)) == sorted([*range(5)] * 3)

    assert take(3, 3, 2, seed=0, shuffle=False) == [[0, 1], [2, 0], [1, 2]]

    assert count_updates(100, 32, 1) == 4
    assert count_updates(96, 32, 10) == 30
    assert count_updates(96, 32, 1, 7) == 7
    assert count_updates(96, 32, 10, 50) == 50

    with pytest.raises(ValueError, match="at least one example"):
        next(batch_rows(0, 2, seed=0))


@pytest.mark.parametrize(
    ("size", "batch", "epochs", "examples"),
    [
        (5, 4, 0.5, 2),
        (9, 4, 0.5, 4),
        (100, 10, 1.1, 110),
        (1025, 512, 0.5, 512),
        (10, 4, 0.05, 1),
        (3, 1, 1 / 3, 1),
    ],
)
def test_a_fraction_of_an_epoch_has_as_many_updates_as_are_counted(size, batch, epochs, examples):
    batches = take(99, size, batch, seed=0, epochs=epochs)
    assert sum(map(len, batches)) == count_examples(size, batch, epochs) == examples
    assert len(batches) == count_updates(size, batch, epochs) == -(-examples // batch)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("size", "batch"), [(11, 4), (7, 7), (5, 8)])
def test_drawn_examples_are_those_of_the_updates_before(size, batch, shuffle):
    order = batch_rows(size, batch, seed=3, shuffle=shuffle)
    seen: set[int] = set()
    for update in range(4):
        found = visited_rows(size, update * batch, seed=3, shuffle=shuffle)
        assert found.tolist() == sorted(seen)
        seen |= set(next(order).tolist())
