"""The classes of rows chosen for some data, and how full the rows get."""

from __future__ import annotations

import numpy as np
import pytest

from rlhf_core.packing import Tree, choose_layout, pack


def useful_fraction(packed):
    """Return the share of all slots that hold a token."""
    used = np.concatenate([(batch.rows.visible_until > 0).ravel() for batch in packed])
    return used.mean()


@pytest.mark.parametrize(
    ("branches", "hidden_size"),
    [
        (2, 64),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in ((1, 64), (8, 64), (1, 4096), (2, 4096), (8, 4096))
        ),
    ],
)
def test_chosen_layouts_keep_the_rules(branches, hidden_size):
    rng = np.random.default_rng(branches)
    sizes = np.minimum(rng.lognormal(4.5, 0.8, 500).astype(int) + 2 * branches, 900)
    layout = choose_layout(
        sizes,
        branches,
        hidden_size=hidden_size,
        max_tokens=8192,
        trees_per_update=32,
        trained_counts=sizes // 2,
        row_multiple=4,
    )
    assert 1 <= len(layout.time) <= 3
    assert list(layout.time) == sorted(set(layout.time))
    assert layout.time[-1] >= sizes.max()
    for time, rows, sequences, trained in zip(*layout[:4], strict=True):
        assert time % 32 == 0
        assert time % 64 == 0 or time <= 128
        assert rows % 4 == 0
        assert rows * time <= 8192
        assert sequences % branches == 0
        assert sequences == branches or sequences <= time // 16
        assert trained <= time
        assert trained >= (sizes // 2)[sizes <= time].max()
    trees = []
    for size in sizes[:64]:
        own = np.full(branches, max(1, int(size) // 2 // branches))
        trees.append(Tree(np.ones(size - own.sum(), np.int32), tuple(np.ones(n, np.int32) for n in own)))
    packed = pack(trees, layout)
    assert useful_fraction(packed) > 0.6
    assert sum(int((batch.last >= 0).sum()) for batch in packed) == 64 * branches


def test_a_few_long_trees_get_rows_of_their_own_where_the_run_is_worth_several_programs():
    sizes = np.where(np.arange(400) % 10 == 0, 1000, 40)
    options = {"hidden_size": 32, "max_tokens": 8192, "trees_per_update": 40}
    layout = choose_layout(sizes, 2, **options)
    assert len(layout.time) > 1
    assert layout.time[0] <= 256
    assert layout.trained == (0,) * len(layout.time)
    assert len(choose_layout(sizes, 2, **options, updates=5).time) == 1


@pytest.mark.parametrize("skips", [False, True])
def test_rows_get_the_class_they_need_and_few_slots_are_empty(skips):
    """With attention that skips masked blocks, long rows cost nothing extra and fill best."""
    draw = np.random.default_rng(3)
    sizes = np.minimum(draw.lognormal(5.6, 0.5, 1500).astype(int) + 20, 560)
    layout = choose_layout(
        sizes, 2, hidden_size=256, max_tokens=16384, trees_per_update=32, skips_blocks=skips
    )
    used = slots = 0
    for update in range(20):
        chosen = draw.choice(sizes, 32, replace=False)
        trees = [Tree(np.ones(0, np.int32), (np.ones(n // 2, np.int32),) * 2) for n in chosen]
        packed = pack(trees, layout, group=2)
        assert sum(int((batch.last >= 0).sum()) for batch in packed) == 64, update
        slots += sum(batch.rows.tokens.size for batch in packed)
        used += sum(2 * (n // 2) for n in chosen)
    assert used / slots > (0.9 if skips else 0.8)


def test_layout_has_room_for_what_may_come():
    layout = choose_layout([50, 60], 4, hidden_size=64, max_tokens=2048, trained_counts=[20, 30], longest=700)
    assert layout.time[-1] >= 700
    assert layout.trained[-1] == layout.time[-1]


def test_layout_of_a_small_update_is_small():
    layout = choose_layout([100] * 64, 2, hidden_size=64, max_tokens=1 << 20, trees_per_update=8)
    slots = sum(rows * time for rows, time in zip(layout.rows, layout.time, strict=True))
    assert slots <= 8 * 128


def test_the_largest_class_holds_all():
    sizes = [40, 50, 60, 700]
    layout = choose_layout(sizes, 1, hidden_size=64, max_tokens=1024, trees_per_update=4)
    trees = [Tree(np.zeros(0, np.int32), (np.ones(size, np.int32),)) for size in sizes]
    batches = pack(trees, layout.largest())
    assert len({batch.rows.tokens.shape for batch in batches}) == 1
    assert sum(int((batch.example >= 0).sum()) for batch in batches) == 4


@pytest.mark.parametrize(("completions", "length"), [(16, 64), (64, 48), (64, 64)])
def test_rollouts_of_completions_of_full_length_fill_their_rows(completions, length):
    """The rows are made for them; what shorter completions do not write stays empty."""
    prompts = np.random.default_rng(0).integers(53, 56, completions // 8)
    sizes, group = prompts + 8 * length, np.ones(length, np.int32)
    layout = choose_layout(
        sizes,
        8,
        hidden_size=576,
        max_tokens=int(sizes.sum()),
        trees_per_update=len(sizes),
        trained_counts=np.full(len(sizes), 8 * length),
        skips_blocks=True,
    )
    packed = pack([Tree(np.ones(n, np.int32), (group,) * 8) for n in prompts], layout)
    assert useful_fraction(packed) > 0.95
    slots = sum(batch.rows.tokens.size for batch in packed)
    short = pack([Tree(np.ones(n, np.int32), (group[: length * 3 // 4],) * 8) for n in prompts], layout)
    assert sum(batch.rows.tokens.size for batch in short) == slots
