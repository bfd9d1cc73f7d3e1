"""Rows of samples/ and evaluations/: completions as the page shows them, before and after; scores of pairs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_report.run_reader import ReportedStage, number

Described = dict[str, Any]
"""A completion as the page shows it, see `described`; those of samples/ also have `prompt` and `columns`."""

MOST = 16
"""Most prompts to show."""
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Quantiles of the reward at which completions are shown."""
PLACES = ("lowest reward", "lower quartile", "median", "upper quartile", "highest reward")
READ = 60
"""Files of completions to read for the distributions, evenly spread over the run."""
LONGEST_CELL = 300
"""Characters of a column's value to show."""
PERCENTILES = (5, 25, 50, 75, 95)
DAMAGED = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""What a file of another form than is written raises."""


def described(sample: Mapping[str, Any]) -> Described:
    """Describe a completion, or an episode with its messages; what has another form than is written is left out."""
    said, rewards = sample.get("completion"), sample.get("rewards")
    return {
        "text": text_of(said),
        **({"messages": _messages(sample, said)} if isinstance(said, list) else {}),
        "reward": number(sample.get("reward")),
        "rewards": {str(name): number(value) for name, value in rewards.items()}
        if isinstance(rewards, Mapping)
        else {},
        "advantage": number(sample.get("advantage")),
        "length": number(sample.get("length")),
        "finish": finish(sample),
        **({"dropped": str(sample["failure"])} if sample.get("failure") else {}),
    }


def asked(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Describe what a completion answers: its prompt, as messages too where it is a conversation, and its columns."""
    prompt, columns = sample.get("prompt"), sample.get("columns")
    return {
        "prompt": text_of(prompt),
        **({"messages": [message(each) for each in prompt]} if isinstance(prompt, list) else {}),
        "columns": {str(name): _cell(value) for name, value in columns.items()}
        if isinstance(columns, Mapping)
        else {},
    }


def _cell(value: Any) -> str:
    text = text_of(value)
    return text if len(text) <= LONGEST_CELL else f"{text[:LONGEST_CELL]}… ({len(text):,} characters)"


def finish(sample: Mapping[str, Any]) -> str:
    """Say how a completion ended: "stop", "length" where it was cut, or "failed"."""
    if sample.get("failure"):
        return "failed"
    return "length" if sample.get("finished") is False else "stop"


def _messages(sample: Mapping[str, Any], said: Sequence[Any]) -> list[dict[str, Any]]:
    """Describe the messages of an episode.

    policy: whether the policy wrote it. turn: its number among the policy's, with the turn's tokens and reward. added:
    the environment wrote it as the assistant.
    """
    shown = [message(each) for each in said]
    turns = _turns(sample)
    assistant = [place for place, one in enumerate(shown) if one["role"] == "assistant"]
    recorded = [place for turn in turns for place in assistant if place == turn.get("message")]
    written = recorded if turns and len(recorded) == len(turns) else assistant
    for place, one in enumerate(shown):
        one["policy"] = place in written
    if len(written) == len(turns):  # else it is not known which of them the environment added
        for count, (place, turn) in enumerate(zip(written, turns, strict=True), 1):
            numbers = {name: number(turn.get(name)) for name in ("tokens", "reward")}
            shown[place] |= {"turn": count, **numbers}
        for place in set(assistant) - set(written):
            shown[place]["added"] = True
    return shown


def _turns(sample: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what is known of the policy's turns; empty where the completion is no episode."""
    turns = sample.get("turns")
    return [turn for turn in turns if isinstance(turn, Mapping)] if isinstance(turns, list) else []


def _role(each: Any) -> str:
    return str(each.get("role", "")) if isinstance(each, Mapping) else ""


def message(each: Any) -> dict[str, Any]:
    """Describe a message, its tool calls in its content. errors: what was wrong with other calls."""
    if not isinstance(each, Mapping):
        return {"role": "", "content": str(each)}
    calls, errors = each.get("tool_calls"), each.get("call_errors")
    parts = [text_of(each.get("content")), *(map(_call, calls) if isinstance(calls, list) else [])]
    return {
        "role": _role(each),
        "content": "\n".join(filter(None, parts)),
        **({"name": str(each["name"])} if each.get("name") else {}),
        **({"errors": [str(error) for error in errors]} if isinstance(errors, list) and errors else {}),
    }


def _call(call: Any) -> str:
    """Write a call of a tool as NAME(ARGUMENTS)."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return json.dumps(call, ensure_ascii=False)
    arguments = function.get("arguments")
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"{function.get('name')}({written})"


def text_of(said: Any) -> str:
    """Return a text, or the messages of a conversation one after the other; of a single reply its content."""
    if isinstance(said, str):
        return said
    if not isinstance(said, list):
        return "" if said is None else json.dumps(said, ensure_ascii=False)
    if len(said) == 1 and _role(said[0]) == "assistant" and not said[0].get("tool_calls"):
        return text_of(said[0].get("content"))
    return "\n".join(f"{each['role']}: {each['content']}" for each in map(message, said))


@dataclass(frozen=True)
class Completions:
    """Completions after `updates` (first, last), or of the rollouts right before these; equal if there is only one.

    same_prompts: each of `sides` has the median of a prompt's `group` completions, and `means` are over all of them;
    else the prompts differ, and each has the same quantile of the reward. prompt_means: mean rewards of every prompt,
    before and after, in the first case. fixed: whether the prompts are those that are completed at every evaluation.
    """

    updates: tuple[int, int]
    sides: tuple[dict[str, Any], ...]
    same_prompts: bool
    group: int = 1
    means: tuple[dict[str, Any], ...] = ()
    prompt_means: tuple[tuple[float | None, float | None], ...] = ()
    fixed: bool = False

    @property
    def of_fixed_prompts_twice(self) -> bool:
        """Whether the same fixed prompts were completed at two updates."""
        return self.fixed and self.updates[0] != self.updates[1]


def same_prompts(
    updates: tuple[int, int], early: Sequence[Described], late: Sequence[Described] | None
) -> Completions | None:
    """Pair the completions of every prompt sampled both times; None without any. late: None if there is one time.

    The prompts whose mean reward changed most come first.
    """
    before = _by_prompt(early)
    after = {} if late is None else _by_prompt(late)
    shared = [prompt for prompt in before if late is None or prompt in after]
    if not shared:
        return None
    sides = [_opposite(before[prompt], after.get(prompt, ())) for prompt in shared]
    texts = [[text for prompt in shared for text in side.get(prompt, ())] for side in (before, after)]
    return Completions(
        updates,
        tuple(sorted(sides, key=_change)[:MOST]),
        True,
        group=max(len(before[prompt]) for prompt in shared),
        means=tuple(_means(*texts)),
        prompt_means=tuple((side["means"][0], side["means"][1]) for side in sides),
    )


def same_places(
    updates: tuple[int, int], early: Sequence[Described], late: Sequence[Described] | None
) -> Completions:
    """Pair completions at the same quantiles of the reward, from the lowest to the highest."""
    before = _ordered(early)
    after = None if late is None else _ordered(late)
    sides = [
        {
            "place": name,
            "before": _place(before, share),
            "after": None if after is None else _place(after, share),
        }
        for name, share in zip(PLACES, SHARES, strict=True)
    ]
    return Completions(updates, tuple(sides), False)


def _by_prompt(texts: Sequence[Described]) -> dict[str, list[Described]]:
    groups: dict[str, list[Described]] = {}
    for text in texts:
        groups.setdefault(text["prompt"], []).append(text)
    return groups


def _opposite(before: Sequence[Described], after: Sequence[Described]) -> dict[str, Any]:
    """Describe a prompt with its completions of median reward, and the mean rewards of all, before and after."""
    return {
        **{name: before[0][name] for name in ("prompt", "asked", "columns")},
        "before": _middle(before),
        "after": _middle(after),
        "means": [_mean([text["reward"] for text in side]) for side in (before, after)],
    }


def _change(side: Mapping[str, Any]) -> float:
    """Return the place of a prompt: by how much its mean reward changed, the most first."""
    before, after = side["means"]
    return 0.0 if before is None or after is None else -abs(after - before)


def _means(before: Sequence[Described], after: Sequence[Described]) -> list[dict[str, Any]]:
    """Return the means over all completions, before and after: of the reward, each function's, and the tokens."""
    names = dict.fromkeys(name for text in (*before, *after) for name in text["rewards"])
    quantities: dict[str, Callable[[Described], Any]] = {"reward": lambda text: text["reward"]}
    if len(names) > 1:
        quantities |= {name: lambda text, name=name: text["rewards"].get(name) for name in names}
    quantities["tokens"] = lambda text: text["length"]
    rows = [
        {
            "name": name,
            "before": _mean(list(map(quantity, before))),
            "after": _mean(list(map(quantity, after))),
        }
        for name, quantity in quantities.items()
    ]
    return [row for row in rows if row["before"] is not None or row["after"] is not None]


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return float(np.mean(numbers)) if numbers else None


def _ordered(texts: Sequence[Described]) -> list[Described]:
    return sorted(texts, key=lambda text: -np.inf if text["reward"] is None else text["reward"])


def _middle(texts: Sequence[Described]) -> Described | None:
    """Return the completion of median reward, with the number of those with its text."""
    if not texts:
        return None
    middle = _place(_ordered(texts), 0.5)
    return middle | {"copies": sum(text["text"] == middle["text"] for text in texts)}


def _place(ordered: Sequence[Described], share: float) -> Described:
    return ordered[round(share * (len(ordered) - 1))]


@dataclass(frozen=True)
class Spread:
    """A quantity at several updates: `percentiles` float64 [updates, 5]; all values at the first and last update."""

    name: str
    updates: NDArray[np.float64]
    percentiles: NDArray[np.float64]
    first: NDArray[np.float64]
    last: NDArray[np.float64]


def completions(stage: ReportedStage) -> tuple[Completions | None, list[Spread]]:
    """Return completions to show before and after, and distributions of rewards and lengths in rollouts."""
    files = stage.files.samples("update")
    steps = list(files)
    if len(steps) > READ:
        steps = [steps[i] for i in np.unique(np.linspace(0, len(steps) - 1, READ).astype(int))]
    # A file is numbered by the updates before its rollout; metrics.jsonl has its metrics at the next update.
    sampled = {step + 1: _texts(files[step]) for step in steps}
    rollouts = {step: texts for step, texts in sampled.items() if texts}
    spreads = [_spread(name, rollouts) for name in ("reward", "length")]
    opposite = fixed_prompts(stage, [], "evaluation") or (_of_rollouts(rollouts) if rollouts else None)
    return opposite, [spread for spread in spreads if spread is not None]


def fixed_prompts(stage: ReportedStage, problems: list[str], name: str) -> Completions | None:
    """Pair the first completions of fixed prompts with the trained model's. name: "evaluation" or "preview"."""
    files = stage.files.samples(name)
    read = [(step, _texts(files[step])) for step in _ends(stage, files)]
    previews = [(step, texts) for step, texts in read if texts]
    if not previews:
        return None
    (first, early), (last, late) = previews[0], previews[-1]
    pairs = same_prompts((first, last), early, late if len(previews) > 1 else None)
    return None if pairs is None else replace(pairs, fixed=True)


def _ends(stage: ReportedStage, files: Mapping[int, Any]) -> list[int]:
    """Return the first update with a file and the trained model's, which may be the best evaluation's."""
    if not files:
        return []
    best = stage.files.best.get("model")
    return sorted({min(files), best if isinstance(best, int) and best in files else max(files)})


def _texts(rows: Sequence[Mapping[str, Any]]) -> list[Described]:
    """Describe the completions among the rows of a file."""
    texts = []
    for row in rows:
        if "completion" in row:
            question = asked(row)
            kept = {"prompt": question["prompt"], "columns": question["columns"]}
            texts.append({**kept, "asked": question.get("messages"), **described(row)})
    return texts


def _of_rollouts(rollouts: Mapping[int, Sequence[Described]]) -> Completions:
    """Pair the first rollout with the last one, by shared prompts, else by quantile of the reward."""
    first, last = min(rollouts), max(rollouts)
    late = rollouts[last] if last != first else None
    shared = None if late is None else same_prompts((first, last), rollouts[first], late)
    return shared or same_places((first, last), rollouts[first], late)


def _spread(name: str, rollouts: Mapping[int, Sequence[Described]]) -> Spread | None:
    values = {}
    for step, texts in rollouts.items():
        numbers = [text[name] for text in texts if text[name] is not None]
        if numbers:
            values[step] = np.array(numbers, np.float64)
    if not values:
        return None
    steps = list(values)
    return Spread(
        name,
        np.array(steps, np.float64),
        np.array([np.percentile(values[step], PERCENTILES) for step in steps]),
        values[steps[0]],
        values[steps[-1]],
    )


def scored_pairs(stage: ReportedStage) -> list[dict[str, Any]]:
    """Return the held-out pairs that the stage's evaluations stored, with their scores at the first and the last."""
    files = stage.files.samples("evaluation")
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for step in _ends(stage, files):
        for row in files[step]:
            chosen, rejected = number(row.get("chosen_score")), number(row.get("rejected_score"))
            if chosen is not None and rejected is not None:
                texts = [text_of(row.get(part)) for part in ("prompt", "chosen", "rejected")]
                scores = found.setdefault((Path(text_of(row.get("row"))).name, *texts), [])
                scores.append({"update": step, "chosen": chosen, "rejected": rejected})
    names = ("row", "prompt", "chosen", "rejected")
    return [{**dict(zip(names, key, strict=True)), "scores": scores} for key, scores in found.items()]


def evaluations(stage: ReportedStage, problems: list[str]) -> list[dict[str, Any]]:
    """Return `step` and the content of two files of evaluations/: the first, and the trained model's.

    The content is `scores` and `calibration` of pairs, or `prompt_rewards`, `row_losses` or the number of `pairs`
    (of the first set).
    """
    files = stage.files.evaluations
    results = []
    for step in _ends(stage, files):
        try:
            found = _evaluation(files[step])
        except DAMAGED:
            problems.append(f"{stage.name}/evaluations/{step:06d}.json is not readable")
            continue
        if found:
            results.append({"step": step, **found})
    return results


def _evaluation(content: Mapping[str, Any]) -> dict[str, Any]:
    """Take what the page shows from an evaluation. Raises one of DAMAGED for another form."""
    if "scores" in content:
        return _score_distributions(content)
    rewards = content.get("prompt_rewards")  # of earlier versions, which wrote no rows
    if rewards is not None:
        return {"prompt_rewards": _floats(rewards)}
    return _row_values(content)


def _row_values(content: Mapping[str, Any]) -> dict[str, Any]:
    """Take the rewards or losses of the rows of the first set, or the number of its pairs."""
    rows: Sequence[Mapping[str, Any]] = content["rows"]
    rows = [row for row in rows if row.get("set") == rows[0].get("set")]
    # The implicit rewards of KTO's rows are no rewards of prompts: those of bad replies are to fall.
    is_implicit = any(name.endswith("rewards/chosen") for name in content.get("metrics") or ())
    for value, name in (("reward", "prompt_rewards"), ("loss", "row_losses")):
        if not (value == "reward" and is_implicit) and any(value in row for row in rows):
            return {name: _floats(row[value] for row in rows)}
    return {"pairs": len(rows)} if any("chosen" in row for row in rows) else {}


def _floats(values: Iterable[Any]) -> list[float | None]:
    return [None if value is None else float(value) for value in values]


def _score_distributions(content: Mapping[str, Any]) -> dict[str, Any]:
    edges = [float(x) for x in content["scores"]["edges"]]
    counts = {side: [float(x) for x in content["scores"][side]] for side in ("chosen", "rejected")}
    if any(len(count) != len(edges) - 1 for count in counts.values()):
        raise ValueError
    bins = [
        {key: float(row[key]) for key in ("confidence", "right", "pairs")} for row in content["calibration"]
    ]
    return {"scores": {"edges": edges, **counts}, "calibration": bins}
