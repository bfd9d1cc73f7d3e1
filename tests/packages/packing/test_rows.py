"""Packed rows agree with the separate sequences: each token once, with its position, parent and visibility.

And the classes of rows that are chosen for some data, and how full they get.
"""

from __future__ import annotations

import numpy as np
import pytest

from rlhf_core.packing import Layout, Packed, Tree, choose_layout, pack, shared_prefix, tree, with_room


def ints(*values):
    return np.array(values, np.int32)


def random_trees(seed, count, *, branches=(1, 5), weighted=True):
    rng = np.random.default_rng(seed)
    trees = []
    for _ in range(count):
        n = int(rng.integers(*branches))
        lengths = rng.integers(1, 13, n)
        own = tuple(rng.integers(1, 500, k).astype(np.int32) for k in lengths)
        weights = tuple(rng.choice([0.0, 1.0, 0.5], k).astype(np.float32) for k in lengths)
        trees.append(
            Tree(
                prefix=rng.integers(1, 500, int(rng.integers(0, 9))).astype(np.int32),
                branches=own,
                weights=weights if weighted else None,
                token_values={"old": tuple(rng.normal(size=k).astype(np.float32) for k in lengths)},
                sequence_values={"advantage": rng.normal(size=n).astype(np.float32)},
            )
        )
    return trees


LAYOUT = Layout(time=(32, 64), rows=(3, 2), sequences=(4, 4), trained=(32, 40))


def unpack(packed: list[Packed]):
    """Read back each sequence of each row, token by token, by the layout's definition."""
    found = []
    for batch in packed:
        rows = batch.rows
        for r in range(rows.tokens.shape[0]):
            for s in range(batch.last.shape[1]):
                end = int(batch.last[r, s])
                if end < 0:
                    assert batch.example[r, s] == -1
                    continue
                keys = [k for k in range(end + 1) if end < rows.visible_until[r, k]]
                own = [k for k in keys if rows.sequence[r, k] == s]
                slots = {int(index): k for k, index in enumerate(batch.trained[r]) if index >= 0}
                found.append(
                    {
                        "example": int(batch.example[r, s]),
                        "tokens": rows.tokens[r, keys].tolist(),
                        "positions": rows.positions[r, keys].tolist(),
                        "parents": [keys.index(p) if p >= 0 else -1 for p in rows.parent[r, keys].tolist()],
                        "own": len(own),
                        "own_last": own == keys[len(keys) - len(own) :],
                        "weight": rows.weight[r, keys].tolist(),
                        "old": {
                            keys.index(k): float(batch.token_values["old"][r, slots[k]])
                            for k in own
                            if k in slots
                        },
                        "advantage": float(batch.sequence_values["advantage"][r, s]),
                    }
                )
    return found


def expected(trees):
    out = []
    for i, t in enumerate(trees):
        for b, branch in enumerate(t.branches):
            p, n = len(t.prefix), len(t.prefix) + len(branch)
            weight = [0.0] * p + (t.weights[b].tolist() if t.weights else [1.0] * len(branch))
            weight[0] = 0.0
            old = t.token_values["old"][b]
            out.append(
                {
                    "example": i,
                    "tokens": [*t.prefix.tolist(), *branch.tolist()],
                    "positions": list(range(n)),
                    "parents": list(range(-1, n - 1)),
                    "own": len(branch),
                    "own_last": True,
                    "weight": weight,
                    "old": {k: float(old[k - p]) for k in range(p, n) if weight[k]},
                    "advantage": float(t.sequence_values["advantage"][b]),
                }
            )
    return out


def key(item):
    return (item["example"], item["tokens"], item["advantage"])


@pytest.mark.parametrize("seed", range(8))
def test_every_sequence_comes_back(seed):
    trees = random_trees(seed, 17, weighted=seed % 2 == 0)
    packed = pack(trees, LAYOUT, token_names=["old"], sequence_names=["advantage"])
    assert sorted(unpack(packed), key=key) == sorted(expected(trees), key=key)


@pytest.mark.parametrize("seed", range(4))
def test_visibility_is_that_of_the_separate_sequences(seed):
    """Compute a row's visibility [query, key] token by token: earlier tokens of its sequence and prefix only."""
    for batch in pack(random_trees(seed, 11), LAYOUT):
        for r in range(batch.rows.tokens.shape[0]):
            until, sequence = batch.rows.visible_until[r], batch.rows.sequence[r]
            time = len(until)
            seen = np.array([[k <= q < until[k] for k in range(time)] for q in range(time)])
            wanted = np.zeros((time, time), bool)
            # A token's tree is its sequence's; a prefix lies right before its tree's branches.
            example = np.append(batch.example[r], -1)[sequence]
            owners = np.full(time, -1)
            for q in np.flatnonzero(until):
                owners[q] = next(e for e in example[q:] if e >= 0)
            for q in range(time):
                for k in range(q + 1):
                    same_tree = owners[q] == owners[k] >= 0
                    wanted[q, k] = same_tree and sequence[k] in (-1, sequence[q])
            np.testing.assert_array_equal(seen, wanted)


@pytest.mark.parametrize("seed", range(4))
def test_micro_batches_have_static_shapes_and_dtypes(seed):
    packed = pack(random_trees(seed, 23), LAYOUT, token_names=["old"], sequence_names=["advantage"])
    shapes = {
        time: (rows, sequences, trained) for time, rows, sequences, trained in zip(*LAYOUT[:4], strict=True)
    }
    for batch in packed:
        time = batch.rows.tokens.shape[1]
        rows, sequences, trained = shapes[time]
        assert {array.shape for array in batch.rows} == {(rows, time)}
        assert [array.dtype for array in batch.rows] == [np.int32] * 5 + [np.float32]
        assert (
            batch.last.shape
            == batch.example.shape
            == batch.sequence_values["advantage"].shape
            == (rows, sequences)
        )
        assert batch.trained.shape == batch.token_values["old"].shape == (rows, trained)
        assert {batch.last.dtype, batch.example.dtype, batch.trained.dtype} == {np.dtype(np.int32)}
        assert batch.example.max() >= 0, "a micro-batch without any sequence"
        unused = batch.rows.visible_until == 0
        assert (batch.rows.tokens[unused] == 0).all()
        assert (batch.rows.parent[unused] == -1).all()
        assert (batch.rows.sequence[unused] == -1).all()
        assert (batch.rows.weight[unused] == 0).all()
        for r in range(rows):
            np.testing.assert_array_equal(
                batch.trained[r][batch.trained[r] >= 0], np.flatnonzero(batch.rows.weight[r])
            )


def test_pairs_lie_side_by_side():
    trees = random_trees(3, 30, branches=(2, 3))
    for batch in pack(trees, LAYOUT, group=2):
        np.testing.assert_array_equal(batch.example[:, 0::2], batch.example[:, 1::2])


@pytest.mark.parametrize(
    ("layout", "group", "sizes"),
    [
        (Layout((8,), (1,), (8,), (32,)), 1, [3, 3]),
        (Layout((8,), (1,), (8,), (32,)), 2, [2, 2, 2]),
        (Layout((64,), (1,), (4,), (32,)), 1, [4, 2]),
        (Layout((64,), (1,), (8,), (4,)), 1, [2, 2, 2]),
    ],
)
def test_trees_that_fit_no_row_are_split_between_groups(layout, group, sizes):
    """By their tokens, by how many sequences a row has, and by how many are trained."""
    tree = Tree(ints(5), tuple(ints(7, 8) for _ in range(6)))
    packed = pack([tree], layout, group=group)
    assert [int((batch.last >= 0).sum()) for batch in packed] == sizes


def test_a_class_without_trees_gives_no_micro_batch():
    assert pack([], LAYOUT) == []
    packed = pack([Tree(ints(), (np.arange(1, 40, dtype=np.int32),))], LAYOUT)
    assert [batch.rows.tokens.shape for batch in packed] == [(2, 64)]


def test_trained_zero_limits_nothing_and_lays_out_nothing():
    packed = pack(random_trees(1, 5, weighted=False), Layout((64,), (4,), (4,), (0,)))
    assert all(batch.trained.shape == (4, 0) for batch in packed)
    assert sum(int((batch.last >= 0).sum()) for batch in packed) == sum(
        len(t.branches) for t in random_trees(1, 5)
    )


@pytest.mark.parametrize(
    ("sequences", "first_trained", "length"),
    [
        (([1, 2, 3], [1, 2, 4]), None, 2),
        (([1, 2, 3], [1, 2, 3]), None, 2),  # identical: both keep a token
        (([1, 2], [1, 2, 3]), None, 1),  # one is the start of the other
        (([1], [1]), None, 0),
        (([5, 2], [1, 2]), None, 0),
        (([1, 2, 3, 4], [1, 2, 3, 5]), [2, 3], 2),
        (([1, 2, 3], [1, 2, 4], [1, 9, 9]), None, 1),
        (([1, 2, 3],), None, 0),
    ],
)
def test_shared_prefix(sequences, first_trained, length):
    assert shared_prefix([ints(*s) for s in sequences], first_trained=first_trained) == length


def test_tree_shares_no_trained_token():
    weights = [np.array([0, 0, 1, 1], np.float32), np.array([0, 0, 0, 1], np.float32)]
    made = tree([ints(1, 2, 3, 4), ints(1, 2, 3, 5)], weights, token_values={"old": weights})
    assert made.prefix.tolist() == [1, 2]
    assert [w.tolist() for w in made.weights] == [[1, 1], [0, 1]]
    assert [v.tolist() for v in made.token_values["old"]] == [[1, 1], [0, 1]]
    with pytest.raises(ValueError, match="at least one token"):
        tree([ints(1), ints()])


def test_long_trees_are_split_with_their_prompt_repeated():
    t = random_trees(5, 1, branches=(12, 13))[0]
    assert t.size > LAYOUT.time[-1]
    packed = pack([*random_trees(6, 3), t], LAYOUT, token_names=["old"], sequence_names=["advantage"])
    assert sorted(unpack(packed), key=key) == sorted(expected([*random_trees(6, 3), t]), key=key)
    with pytest.raises(ValueError, match=r"branches of \[2, 2\] tokens does not fit a row of 4 tokens"):
        pack([Tree(ints(1), (ints(2, 3), ints(2, 3)))], Layout((4,), (1,), (2,), (8,)), group=2)


def test_trees_that_fit_no_class_get_a_longer_one() -> None:
    layout = Layout((16, 32), (4, 2), (2, 4), (0, 0))
    short, long = (tree([np.arange(n, dtype=np.int32), np.arange(1, n + 1, dtype=np.int32)]) for n in (8, 20))
    assert with_room(layout, [short], 2) is layout
    longer = with_room(layout, [short, long], 2)
    assert (longer.time, longer.rows, longer.sequences) == ((16, 32, 64), (4, 2, 2), (2, 4, 4))
    assert with_room(layout, [short, long], 1) is layout  # split, each branch fits
    assert sum((batch.example >= 0).sum() for batch in pack([short, long], longer, group=2)) == 4
    trained = layout._replace(trained=(4, 8))
    assert with_room(trained, [short], 2).trained == (4, 8, 32)
    assert with_room(trained, [short], 2).time == (16, 32, 32)


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
