"""Rollouts of the page: groups of completions, copies folded, sorted and filtered, and the tokens of a completion."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_core.runs import StageDirectory
from rlhf_report.samples import asked, described, finish
from rlhf_report.watch.listing import finite

SORTS = ("order", "reward", "spread", "length", "advantage")
WHERE = ("reward", "advantage", "length", "version", "age")
MOST = 200
"""Groups of one answer."""

Decode = Callable[[Sequence[int], Sequence[int]], list[str]]
"""From ids, and the ids before them, to the text of each."""


@dataclass(frozen=True)
class WantedRollouts:
    """What of a rollout is shown: bounds of a quantity, how completions ended, a text within them, and the order.

    where: the quantity, or a reward. without: only completions that have none.
    """

    sort: str = "order"
    search: str = ""
    finish: str = ""
    where: str = ""
    least: float | None = None
    most: float | None = None
    without: bool = False
    offset: int = 0
    limit: int = 50

    @property
    def is_bounded(self) -> bool:
        """Whether the quantity decides what is shown."""
        return self.without or self.least is not None or self.most is not None

    def of(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a group with those of its completions that are shown."""
        return {**group, "completions": [one for one in group["completions"] if self.keeps(one)]}

    def keeps(self, one: Mapping[str, Any]) -> bool:
        """Return whether a completion is shown."""
        if self.finish and one["finish"] != self.finish:
            return False
        if self.search and self.search.lower() not in one["text"].lower():
            return False
        if not self.where or not self.is_bounded:
            return True
        value = one[self.where] if self.where in WHERE else one["rewards"].get(self.where)
        if value is None or self.without:
            return value is None and self.without
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


@dataclass(frozen=True)
class Sampled:
    """A rollout with its place among the updates.

    samples: a row for each completion. arrays: those of the journal; empty where only the samples are there.
    update: the first that it serves, counted from 1. group: completions of a prompt.
    """

    number: int
    update: int
    group: int
    samples: Sequence[Mapping[str, Any]]
    arrays: Mapping[str, np.ndarray]
    advantages: Sequence[float | None]

    @property
    def rows(self) -> list[int]:
        """The rows of the prompts' data, one for each group; -1 where they are not known."""
        prompts = self.arrays.get("prompts")
        count = math.ceil(len(self.samples) / self.group)
        return [-1] * count if prompts is None else [int(row) for row in prompts]


def updates_per_rollout(stage: StageDirectory) -> int:
    """Return how many updates a rollout serves."""
    config = stage.config
    each = [config.get(name) for name in ("steps_per_generation", "num_iterations")]
    counts = [count for count in each if isinstance(count, int) and not isinstance(count, bool) and count > 0]
    return int(np.prod(counts, dtype=np.int64)) if counts else 1


def read_sampled(stage: StageDirectory, update: int) -> Sampled | None:
    """Read the rollout that serves an update; None where neither the journal nor the samples have it."""
    times = updates_per_rollout(stage)
    number = (update - 1) // times
    first = number * times + 1
    described = stage.samples("update")
    prepared: list[dict[str, Any]] = described.get(first - 1, [])
    file = stage.rollout_file(number)
    if file is None and not prepared:
        return None
    samples = prepared if file is None else file.samples
    arrays: Mapping[str, np.ndarray] = {} if file is None else file.arrays
    kept = arrays.get("advantages")
    advantages: list[float | None] = [None] * len(samples)
    if kept is not None and len(kept) == len(samples):
        mask = arrays["samples_mask"]
        advantages = [_mean(kept[i][mask[i]] if kept.ndim > 1 else kept[i]) for i in range(len(samples))]
    elif len(prepared) == len(samples):
        advantages = [finite(row.get("advantage")) for row in prepared]
    group = group_size(stage, samples, arrays)
    return Sampled(number, first, group, samples, arrays, advantages)


def _mean(values: Any) -> float | None:
    return finite(float(np.mean(values))) if np.size(values) else None


def group_size(stage: StageDirectory, samples: Sequence[Any], arrays: Mapping[str, np.ndarray]) -> int:
    """Return how many completions each prompt of a rollout has."""
    prompts = arrays.get("prompts")
    if prompts is not None and len(prompts):
        return max(len(samples) // len(prompts), 1)
    size = stage.config.get("num_generations")
    return size if isinstance(size, int) and size > 0 else 1


def groups_of(rollout: Sampled, wanted: WantedRollouts) -> list[dict[str, Any]]:
    """Return the groups with the completions that are wanted, in the order that is wanted."""
    found = []
    for place, row in enumerate(rollout.rows):
        start = place * rollout.group
        members = range(start, min(start + rollout.group, len(rollout.samples)))
        shown = [one for one in folded(rollout, members) if wanted.keeps(one)]
        if shown:
            found.append(_described_group(rollout, row, members, shown))
    return in_order(found, wanted.sort)


def in_order(groups: list[dict[str, Any]], sort: str) -> list[dict[str, Any]]:
    """Sort groups as asked; those whose quantity is not known come last."""
    by = sort.removeprefix("-")
    if by == "order":
        return groups
    sign = -1 if sort.startswith("-") else 1
    return sorted(groups, key=lambda group: _rank(group, by, sign))


def _described_group(
    rollout: Sampled, row: int, members: Sequence[int], shown: list[dict[str, Any]]
) -> dict[str, Any]:
    rewards = [value for i in members if (value := finite(rollout.samples[i].get("reward"))) is not None]
    return {
        "row": row,
        **asked(rollout.samples[members[0]]),
        "previous": None,
        "next": None,
        "mean": float(np.mean(rewards)) if rewards else None,
        "spread": float(np.std(rewards)) if rewards else None,
        "rollout": rollout.number,
        "update": rollout.update,
        "completions": shown,
    }


def _rank(group: Mapping[str, Any], by: str, sign: int) -> float:
    """Return the place of a group: by its spread, or by the completion of it that comes first in this order."""
    if by == "spread":
        return sign * (group["spread"] or 0.0)
    values = [one[by] for one in group["completions"] if one[by] is not None]
    if not values:
        return math.inf
    return float(max(values)) * -1 if sign < 0 else float(min(values))


def folded(rollout: Sampled, members: Sequence[int]) -> list[dict[str, Any]]:
    """Describe the completions of a group; equal ones with equal numbers are one, with its `copies`."""
    by_text: dict[str, dict[str, Any]] = {}
    for i in members:
        one = completion(rollout, i)
        key = json.dumps(
            [one[n] for n in ("text", "reward", "rewards", "advantage", "finish", "length")], default=str
        )
        same = by_text.setdefault(key, one)
        same["indices"].append(i)
    return [one | {"copies": len(one["indices"])} for one in by_text.values()]


def completion(rollout: Sampled, i: int) -> dict[str, Any]:
    """Describe completion i."""
    version = _item(rollout.arrays, "samples_version", i)
    return {
        "index": i,
        "indices": [],
        **described(rollout.samples[i]),
        "advantage": rollout.advantages[i],
        "version": version,
        "age": None if version is None else rollout.update - 1 - version,
    }


def _item(arrays: Mapping[str, np.ndarray], name: str, i: int) -> int | None:
    array = arrays.get(name)
    return None if array is None or i >= len(array) else int(array[i])


def rewards_of(samples: Sequence[Mapping[str, Any]]) -> list[str]:
    """List the names of the rewards of a rollout."""
    tables = (sample.get("rewards") for sample in samples)
    return list(dict.fromkeys(str(name) for table in tables if isinstance(table, Mapping) for name in table))


def page_of(rollout: Sampled, wanted: WantedRollouts) -> dict[str, Any]:
    """Describe an update's rollout."""
    groups = groups_of(rollout, wanted)
    return {
        "rollout": rollout.number,
        "update": rollout.update,
        "total": len(groups),
        "finishes": [name for name, _ in Counter(map(finish, rollout.samples)).most_common()],
        "rewards": rewards_of(rollout.samples),
        "groups": groups[wanted.offset : wanted.offset + min(wanted.limit, MOST)],
    }


def tokens(
    rollout: Sampled,
    i: int,
    values: Mapping[str, np.ndarray],
    decode: Decode | None,
) -> dict[str, Any]:
    """Describe the tokens of completion i, one value for each, null where one is not known.

    values: of STAGE/values, float32, one for each token that the policy wrote, in the order of the rollout.
    """
    arrays = rollout.arrays
    length = int(arrays["samples_lengths"][i])
    ids = [int(each) for each in arrays["samples_tokens"][i, :length]]
    mask = arrays["samples_mask"][i, :length].astype(bool)
    before = int(arrays["samples_mask"][:i].sum())
    prompt = _prompt(rollout, i)
    found = {
        "index": i,
        "update": rollout.update,
        "ids": ids,
        "texts": None if decode is None else decode(ids, prompt or []),
        "mask": [int(each) for each in mask],
        "sampler_logps": _numbers(arrays["samples_logps"][i, :length], mask),
        "versions": [None if (v := _item(arrays, "samples_version", i)) is None else v] * length,
        "advantages": _token_advantages(rollout, i, mask),
    }
    for name in ("trainer_logps", "entropies", "variances"):
        array = values.get(name)
        known = array is not None and len(array) == int(arrays["samples_mask"].sum())
        spread = np.full(length, np.nan, np.float32)
        if known and array is not None:
            spread[mask] = array[before : before + int(mask.sum())]
        found[name] = _numbers(spread, mask) if known else None
    trainer = _kept_logps(arrays, i, length, mask)
    if found["trainer_logps"] is None and trainer is not None:
        found["trainer_logps"] = trainer
    found["prompt"] = None
    if prompt is not None:
        found["prompt"] = {"ids": prompt, "texts": None if decode is None else decode(prompt, [])}
    return found


def _kept_logps(
    arrays: Mapping[str, np.ndarray], i: int, length: int, mask: np.ndarray
) -> list[float | None] | None:
    """Return the trainer's log-probabilities where the journal itself has them."""
    array = arrays.get("value_old_logps")
    return None if array is None else _numbers(array[i, :length], mask)


def _numbers(values: np.ndarray, mask: np.ndarray) -> list[float | None]:
    """Return float32 numbers as they are; None where one is not finite, or the policy wrote no token."""
    kept = mask & np.isfinite(values)
    return [float(value) if there else None for value, there in zip(values, kept, strict=True)]


def _token_advantages(rollout: Sampled, i: int, mask: np.ndarray) -> list[float | None] | None:
    array = rollout.arrays.get("advantages")
    if array is not None and array.ndim > 1 and len(array) > i:
        return _numbers(array[i, : len(mask)], mask)
    one = rollout.advantages[i]
    if one is None:
        return None
    return [one if there else None for there in mask]


def _prompt(rollout: Sampled, i: int) -> list[int] | None:
    """Return the ids of the prompt of completion i."""
    place = i // rollout.group
    for key, lengths in (
        ("prompt_ids", "prompt_lengths"),
        ("episodes_prompts", "episodes_prompt_lengths"),
    ):
        ids, counts = rollout.arrays.get(key), rollout.arrays.get(lengths)
        if ids is not None and counts is not None and place < len(counts):
            start = int(counts[:place].sum())
            return [int(each) for each in ids[start : start + int(counts[place])]]
    return None


def read_values(stage: StageDirectory, number: int) -> dict[str, np.ndarray]:
    """Read STAGE/values/NNNNNN.npz; empty where it is missing or damaged."""
    return read_arrays(
        stage.dir / "values" / f"{number:06d}.npz", ("trainer_logps", "entropies", "variances")
    )


def read_arrays(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Read arrays of an .npz; empty where the file is missing, being written or damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in names if name in file}
    except Exception:  # of zipfile, zlib and NumPy
        return {}


def texts_of_tokens(tokenizer: Any) -> Decode:
    """Return a function from ids, and those before them, to the text of each id; joined they are the decoded text.

    A character of several tokens belongs to the last of them.
    """

    def decode(ids: Sequence[int], before: Sequence[int]) -> list[str]:
        return list(_pieces(tokenizer, [*before[-CONTEXT:], *ids]))[len(before[-CONTEXT:]) :]

    return decode


CONTEXT = 4
"""Ids before a text that its first token is read after: some tokenizers drop a space at the beginning of a text."""


def _pieces(tokenizer: Any, ids: Sequence[int]) -> Iterator[str]:
    """Yield what each id adds to the text of those since the last whole character but one."""
    start = whole = 0
    for end in range(1, len(ids) + 1):
        before = tokenizer.decode(ids[start:whole], skip_special_tokens=False)
        text = tokenizer.decode(ids[start:end], skip_special_tokens=False)
        if text.endswith("\ufffd") and end < len(ids):
            yield ""
            continue
        yield text[len(before) :]
        start, whole = whole, end
