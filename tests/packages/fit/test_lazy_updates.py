"""Updates of rows that are encoded on the way: the same for any number of workers, and from any position."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from rlhf_core import data
from rlhf_core.config import TrainerConfig
from rlhf_core.data import Source, usable_pairs, usable_texts
from rlhf_core.data.source import open_files
from rlhf_core.data.streams import first_rows, open_source, open_streams
from rlhf_core.errors import InputError, RunError
from rlhf_core.fit import ExampleUpdates, Update, choose_row_layout
from rlhf_core.tokenizer import TextOptions

LIMIT = 64
pytestmark = pytest.mark.usefixtures("in_small_blocks")


@pytest.fixture(scope="module")
def tokenizer(tiny: ModuleType) -> Any:
    return tiny.make_tokenizer()


def encoding(limit: int = LIMIT) -> Any:
    return partial(data.encode_pairs, max_length=limit, chat_template=TextOptions())


def records(rows: Any, tokenizer: Any, limit: int = LIMIT, seed: int = 3) -> Source:
    usable = partial(usable_pairs, options=TextOptions())
    return open_files(data.load(rows), usable, encoding(limit), tokenizer, seed=seed, shuffle=True)


def streams(spec: Any, tokenizer: Any, window: int = 12, workers: int = 0, **options: Any) -> Source:
    opened = open_streams(spec, **options)
    return open_source(opened, encoding(), tokenizer, seed=3, window=window, workers=workers)


def updates(rows: Source, tiny: ModuleType, names: Any = ("margin",), **options: Any) -> ExampleUpdates:
    config = TrainerConfig(total_batch_size=5, **options)
    layout = choose_row_layout(rows.trees, config, tiny.one_device(), 16, reads_tokens=False)
    return ExampleUpdates(rows, config, layout, vocabulary=1000, say=print, sequence_names=names, group=2)


def names(update: Update) -> list[str]:
    """The rows of an update, in their order."""
    found = [batch.example[batch.example >= 0] for batch in update.batches]
    return [update.where(i) for i in np.unique(np.concatenate(found)).tolist()]


def contents(update: Update) -> list[bytes]:
    leaves = [array.tobytes() for batch in update.batches for array in jax.tree.leaves(batch)]
    return [*leaves, *(name.encode() for name in names(update))]


def rated(tiny: ModuleType, count: int) -> list[dict[str, Any]]:
    return [{**row, "rating": i / 2} for i, row in enumerate(tiny.texts(count))]


def conversations(tiny: ModuleType, count: int) -> list[dict[str, Any]]:
    asked = [{"role": "user", "content": row["prompt"]} for row in tiny.texts(count)]
    return [{"messages": [turn, {"role": "assistant", "content": turn["content"]}]} for turn in asked]


TEXTS = (data.encode_texts, usable_texts)
KINDS: dict[str, Any] = {
    "pairs": (lambda tiny: tiny.pairs(21), data.encode_pairs, usable_pairs, {}),
    "ratings": (partial(rated, count=21), *TEXTS, {"values": ("rating",)}),
    "messages": (partial(conversations, count=21), *TEXTS, {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_without_drops_they_are_those_of_rows_encoded_before(
    kind: str, tiny: ModuleType, tokenizer: Any
) -> None:
    make, encode, usable, values = KINDS[kind]
    options = TextOptions("plain")
    loaded = data.load(make(tiny))
    encode = partial(encode, max_length=LIMIT, chat_template=options, **values)
    usable = partial(usable, options=options, **values)
    rows = open_files(loaded, usable, encode, tokenizer, seed=3, shuffle=True)
    names = values.get("values", ("margin",) if kind == "pairs" else ())
    made = updates(rows, tiny, names=names, num_train_epochs=2.5)
    whole = encode(loaded, tokenizer)
    of_whole = ExampleUpdates(
        Source.of(whole, seed=3), made.config, made.layout, sequence_names=names, group=2
    )
    assert made.total == of_whole.total == 11
    for step in [7, 0, *range(11)]:
        assert contents(made.update(step)) == contents(of_whole.update(step))
        assert made.epochs(step) == of_whole.epochs(step)


def test_a_row_that_is_dropped_makes_room_for_the_next(
    tiny: ModuleType, tokenizer: Any, capsys: Any, tmp_path: Path
) -> None:
    rows = tiny.pairs(40)
    for row in rows[::4]:
        row["chosen"] = " ".join(["word"] * 80)
    rows[1]["chosen"] = rows[1]["rejected"]
    made = updates(records(rows, tokenizer), tiny, num_train_epochs=2)
    assert len(made.data) == 39  # the equal pair needs no tokenizer to be left out
    found = [names(made.update(step)) for step in range(made.total)]
    assert [len(each) for each in found] == [*[5] * 15, 3]
    kept = [name for each in found for name in each]
    assert set(Counter(kept[:29]).values()) == {1}
    assert not {f"dataset row {n}" for n in (2, *range(1, 41, 4))} & set(kept)
    assert "10 over 64 tokens filtered: dataset rows 1, 5, 9" in capsys.readouterr().out
    assert len(list((tmp_path / "cache" / "tokens").iterdir())) == 1
    again = updates(records(rows, tokenizer), tiny, num_train_epochs=2)
    again.update(0)
    again.data.order.wait()  # type: ignore[attr-defined]
    assert [names(again.update(step)) for step in range(made.total)] == found


def made_up(count: int) -> Callable[[], Iterator[dict[str, Any]]]:
    def rows() -> Iterator[dict[str, Any]]:
        letters = "abcdefghijklmnopqrstuvwxyz"
        for i in range(count):
            number = f"{letters[i // 26]} {letters[i % 26]}"
            yield {"prompt": number, "chosen": " A" + " B" * (i % 7), "rejected": " C"}

    return rows


def every_kind(tiny: ModuleType, directory: Path) -> dict[str, Any]:
    first, second = made_up(30), tiny.write_rows(directory / "b.jsonl", tiny.pairs(17))
    packed = directory / "c.jsonl.gz"
    packed.write_bytes(gzip.compress(second.read_bytes()))
    parquet = directory / "d.parquet"
    import datasets

    kept = datasets.Dataset.from_list(tiny.pairs(20))
    kept.to_parquet(str(parquet))
    records = tiny.write_array_record(directory / "e.array_record", tiny.pairs(20))
    return {
        "function": first,
        "array_record": {"path": str(records), "streaming": True},
        "lines": {"name": "jsonl", "path": str(second), "streaming": True},
        "packed": {"path": str(packed), "streaming": True},
        "parquet": {"path": str(parquet), "streaming": True},
        "iterable": kept.to_iterable_dataset(),
        "mixed": [first, {"path": str(second), "streaming": True, "weight": 0.5}, str(second)],
    }


@pytest.mark.parametrize(
    "kind", ["function", "lines", "packed", "parquet", "array_record", "iterable", "mixed"]
)
def test_a_stream_continues_from_any_update(
    tiny: ModuleType, tokenizer: Any, kind: str, tmp_path: Path
) -> None:
    spec = every_kind(tiny, tmp_path)[kind]
    whole = updates(streams(spec, tokenizer), tiny, max_training_steps=12)
    expected, positions = [], []
    for step in range(12):
        positions.append(json.loads(json.dumps(whole.snapshot(step)[0])))
        expected.append(contents(whole.update(step)))
    for killed, workers in [(1, 0), (4, 2 if kind == "function" else 0), (7, 0), (11, 0)]:
        rest = updates(streams(spec, tokenizer, workers=workers), tiny, max_training_steps=12)
        rest.restore(killed, positions[killed], {})
        assert contents(rest.update(0)) == expected[0]  # the loop looks at the first ones again
        assert [contents(rest.update(step)) for step in range(killed, 12)] == expected[killed:]


def test_a_stream_has_each_row_once_before_it_starts_again(tiny: ModuleType, tokenizer: Any) -> None:
    made = updates(streams(made_up(30), tokenizer), tiny, max_training_steps=12)
    found = [name for step in range(12) for name in names(made.update(step))]
    rows = {f"dataset row {n}" for n in range(1, 31)}
    windows = [found[:12], found[12:24]]
    assert [{int(name.split()[-1]) for name in window} for window in windows] == [
        set(range(1, 13)),
        set(range(13, 25)),
    ]
    assert set(found) == rows
    assert set(Counter(found).values()) == {2}
    assert windows[0] != sorted(windows[0], key=lambda name: int(name.split()[-1]))


def test_streams_are_mixed_by_weight(tiny: ModuleType, tokenizer: Any, tmp_path: Path) -> None:
    path = tiny.write_rows(tmp_path / "b.jsonl", tiny.pairs(50))
    spec = [made_up(200), {"path": str(path), "streaming": True, "weight": 0.25}]
    made = updates(streams(spec, tokenizer), tiny, max_training_steps=20)
    found = [name.rpartition(" row ")[0] for step in range(20) for name in names(made.update(step))]
    assert Counter(found) == {"dataset": 80, str(path): 20}
    assert len(first_rows(open_streams(spec), 40)) == 40


def test_a_wrong_row_of_a_stream_is_named_when_it_is_met(
    tiny: ModuleType, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.write_rows(tmp_path / "b.jsonl", tiny.pairs(40))
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:30], "", "{not json", *lines[31:]]))
    monkeypatch.setattr("rlhf_core.data.streams.HEAD", 10)
    made = updates(
        streams({"path": str(path), "streaming": True}, tokenizer, window=1), tiny, max_training_steps=8
    )
    made.update(3)
    with pytest.raises(InputError, match=r"b\.jsonl row 32 is not JSON"):
        made.update(7)
    rows = [*tiny.pairs(30), {"prompt": "a", "chosen": 3, "rejected": "b"}]
    made = updates(streams(lambda: iter(rows), tokenizer, window=1), tiny, max_training_steps=8)
    with pytest.raises(InputError, match="dataset row 31: 'chosen' is a number, not text"):
        made.update(7)

    def failing() -> Iterator[dict[str, Any]]:
        yield from tiny.pairs(30)
        raise ValueError("the disk is gone")

    made = updates(streams(failing, tokenizer, window=1), tiny, max_training_steps=8)
    made.update(3)
    with pytest.raises(RunError, match=r"after row 30: raised ValueError: the disk is gone \(.*test_lazy"):
        made.update(7)


def test_what_cannot_be_streamed_says_why(tiny: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="can be read once"):
        open_streams(iter(tiny.pairs(3)))
    with pytest.raises(InputError, match="dataset has no rows"):
        open_streams(lambda: iter(()))
    with pytest.raises(InputError, match="dataset row 1 is str, not a mapping"):
        open_streams(lambda: iter("ab"))
    with pytest.raises(InputError, match=r"no file .*absent\.jsonl"):
        open_streams({"path": str(tmp_path / "absent.jsonl"), "streaming": True})


def test_a_longer_example_gets_a_longer_row(tiny: ModuleType, tokenizer: Any) -> None:
    rows = tiny.pairs(60)
    lazily = records(rows, tokenizer)
    first = {int(name.split()[-1]) for name in map(lazily.sample.where, range(16))}
    late = next(i for i in range(1, 61) if i not in first)
    rows[late - 1]["chosen"] = " ".join(["word"] * 50)
    made = updates(records(rows, tokenizer), tiny, num_train_epochs=1)
    widths = [max(batch.rows.tokens.shape[1] for batch in made.update(step).batches) for step in range(12)]
    longest = made.layout.time[-1]
    assert sorted(widths)[-2] <= longest < 50 <= max(widths)


def test_ids_that_the_model_lacks_name_their_row(tiny: ModuleType) -> None:
    rows = [{"chosen_ids": [3, 4], "rejected_ids": [3, 5 + i]} for i in range(40)]
    rows[20]["rejected_ids"] = [3, 2000]
    made = updates(records(rows, None), tiny, num_train_epochs=1)
    with pytest.raises(InputError, match="dataset row 21: token id 2000 is out of range"):
        list(itertools.starmap(made.update, ((step,) for step in range(8))))


def numbered(update: Update) -> dict[str, int]:
    """{name of a row: its number}."""
    found: dict[str, int] = {}
    for batch in update.batches:
        used = batch.example >= 0
        pairs = zip(batch.example[used].tolist(), update.numbers(batch)[used].tolist(), strict=True)
        found |= {update.where(i): number for i, number in pairs}
        assert set(update.numbers(batch)[~used].tolist()) <= {-1}
    return found


@pytest.mark.parametrize("kind", ["whole", "large", "stream", "streams"])
def test_numbers_count_all_rows_of_the_data(
    kind: str, tiny: ModuleType, tokenizer: Any, tmp_path: Path
) -> None:
    rows = tiny.pairs(40)
    for row in rows[::4]:
        row["chosen"] = row["rejected"]
    path = tiny.write_rows(tmp_path / "b.jsonl", tiny.pairs(20))
    spec: Any = {"whole": rows, "large": rows, "stream": lambda: iter(rows)}.get(kind)
    if kind == "whole":
        opened = Source.of(encoding()(data.load(rows), tokenizer), seed=3)
    elif kind == "large":
        opened = records(rows, tokenizer)
    else:
        opened = streams(spec or [lambda: iter(rows), str(path)], tokenizer)
    made = updates(opened, tiny, max_training_steps=6)
    for step in range(6):
        for name, number in numbered(made.update(step)).items():
            stream = 1 << 40 if "b.jsonl" in name else 0
            assert number == stream + int(name.split()[-1]) - 1
            assert made.data.where(number) == name


@pytest.mark.parametrize("kind", ["large", "stream"])
def test_positions_of_earlier_versions_are_known(kind: str, tiny: ModuleType, tokenizer: Any) -> None:
    """They are a block, and how many of its examples were used."""
    rows = tiny.pairs(40)
    rows[9]["chosen"] = " ".join(["word"] * 80)

    def opened() -> Source:
        return records(rows, tokenizer) if kind == "large" else streams(lambda: iter(rows), tokenizer)

    names = [example.where for example in opened().next(30)]
    second: dict[str, Any] = {"block": 1} if kind == "large" else opened().order.take(8).after[-1]
    dropped = sum(isinstance(each, data.Dropped) for each in opened_outcomes(opened(), 8))
    old = opened()
    old.restore({"at": second, "used": 3, "dropped": dropped})
    assert [example.where for example in old.next(10)] == names[11 - dropped : 21 - dropped]
    made = updates(opened(), tiny, max_training_steps=6)
    made.restore(4, {"position": {"at": second, "used": 3, "dropped": 0}}, {})
    assert names_of(made.update(4)) == sorted(names[11 - dropped : 16 - dropped])


def opened_outcomes(opened: Source, count: int) -> list[Any]:
    block = opened.order.take(count).block
    assert block is not None
    found = list[Any]()
    assert opened._encoder is not None
    found += opened._encoder(block)
    return found


def names_of(update: Update) -> list[str]:
    return sorted(names(update))


def test_rows_that_are_dropped_are_counted_by_reason(tiny: ModuleType, tokenizer: Any) -> None:
    rows = tiny.pairs(40)
    rows[4]["chosen"] = " ".join(["word"] * 80)
    rows[6]["chosen"] = rows[6]["rejected"]
    rows[9]["chosen"] = rows[9]["rejected"]
    opened = streams(lambda: iter(rows), tokenizer, window=1)
    kept = [example.where for example in opened.next(37)]
    assert kept == [f"dataset row {n}" for n in range(1, 41) if n not in (5, 7, 10)]
    assert opened.dropped == {"too long": 1, "both completions are the same": 2}
    assert opened.state["dropped"] == opened.dropped
    assert opened.end() == "3 rows passed over: both completions are the same (2), too long (1)"
