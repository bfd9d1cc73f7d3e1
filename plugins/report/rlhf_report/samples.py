"""Rows of samples/ and evaluations/: completions and episodes with rewards, pairs with scores, score distributions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_report.run_reader import ReportedStage

MOST = 16
"""Most prompts to show."""
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Quantiles of the reward at which completions are shown."""
PLACES = ("lowest reward", "lower quartile", "median", "upper quartile", "highest reward")


@dataclass(frozen=True)
class Message:
    """One message of an episode.

    calls: of tools, as `name(arguments)`; errors: what was wrong with others.
    turn: the number of the policy's turn, from 1; 0: the environment added the message. tokens, reward: of the turn.
    added: whether it is an assistant's message that the environment wrote.
    """

    role: str
    content: str
    calls: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    turn: int = 0
    tokens: int | None = None
    reward: float | None = None
    added: bool = False


@dataclass(frozen=True)
class ShownText:
    """One completion, or episode.

    rewards: {label: value, None where the function did not apply}; empty where the only one is the reward itself.
    columns: the row's others, as text. advantage: None outside rollouts.
    messages: of an episode, first the `asked` ones of its prompt; left_out: how many more there were. failure: why it
    is not trained on.
    """

    prompt: str
    completion: str
    reward: float | None
    rewards: Mapping[str, float | None]
    length: int | None
    finished: bool
    messages: tuple[Message, ...] = ()
    asked: int = 0
    left_out: int = 0
    failure: str = ""
    columns: Mapping[str, str] = field(default_factory=dict)
    advantage: float | None = None


@dataclass(frozen=True)
class Side:
    """Two completions shown side by side. at: their quantile or prompt; before, after: may be missing.

    means: mean rewards of all completions of the prompt, before and after.
    """

    at: str
    before: ShownText | None
    after: ShownText | None
    means: tuple[float | None, float | None] = (None, None)

    @property
    def columns(self) -> Mapping[str, str]:
        """The columns of the row, for two completions of one prompt."""
        text = self.before or self.after
        return {} if text is None else text.columns

    @property
    def change(self) -> str:
        """`higher`, `lower` or empty: whether the mean reward rose or fell."""
        before, after = self.means
        if before is None or after is None or before == after:
            return ""
        return "higher" if after > before else "lower"


@dataclass(frozen=True)
class MeanPair:
    """A mean over all completions of the prompts sampled both times; None if no completion has a value."""

    name: str
    before: float | None
    after: float | None


@dataclass(frozen=True)
class CompletionGroup:
    """Completions of one prompt in a rollout, those with the highest advantage first; left_out: how many more."""

    prompt: str
    columns: Mapping[str, str]
    texts: tuple[ShownText, ...]
    left_out: int


@dataclass(frozen=True)
class RolloutGroups:
    """Groups of the newest stored rollout, sampled right before update `update`: those whose advantages differ most."""

    update: int
    groups: tuple[CompletionGroup, ...]


@dataclass(frozen=True)
class Completions:
    """Completions after `updates` (first, last), or of the rollouts right before these; equal if there is only one.

    same_prompts: each side shows the median of a prompt's `group` completions, and `means` are over all of them; else
    the prompts differ, and each side shows the same quantile of the reward. prompt_means: mean rewards of every prompt,
    before and after, in the first case. fixed: whether the prompts are those that are completed at every evaluation.
    """

    updates: tuple[int, int]
    sides: tuple[Side, ...]
    same_prompts: bool
    group: int = 1
    means: tuple[MeanPair, ...] = ()
    prompt_means: tuple[tuple[float | None, float | None], ...] = ()
    fixed: bool = False

    @property
    def of_fixed_prompts_twice(self) -> bool:
        """Whether the same fixed prompts were completed at two updates."""
        return self.fixed and self.updates[0] != self.updates[1]

    @property
    def rewards(self) -> int:
        """How many numbers a completion has: 0 without rewards, 1 where a single function gives the reward."""
        texts = [text for side in self.sides for text in (side.before, side.after) if text is not None]
        return max((len(text.rewards) + (text.reward is not None) for text in texts), default=0)

    @property
    def episodes(self) -> bool:
        """Whether any of them is an episode with an environment."""
        return any(text and text.messages for side in self.sides for text in (side.before, side.after))


def same_prompts(
    updates: tuple[int, int], early: Sequence[ShownText], late: Sequence[ShownText] | None
) -> Completions | None:
    """Pair the completions of every prompt sampled both times; None without any. late: None if there is one time."""
    before = _by_prompt(early)
    after = {} if late is None else _by_prompt(late)
    shared = [prompt for prompt in before if late is None or prompt in after]
    if not shared:
        return None
    texts = [[text for prompt in shared for text in side.get(prompt, ())] for side in (before, after)]
    sides = [_opposite(prompt, before[prompt], after.get(prompt, ())) for prompt in shared]
    group = max(len(before[prompt]) for prompt in shared)
    means, by_prompt = tuple(_means(*texts)), tuple(side.means for side in sides)
    return Completions(updates, tuple(sides[:MOST]), True, group, means, by_prompt)


def same_places(
    updates: tuple[int, int], early: Sequence[ShownText], late: Sequence[ShownText] | None
) -> Completions:
    """Pair completions at the same quantiles of the reward, from the lowest to the highest."""
    before, after = _ordered(early), None if late is None else _ordered(late)
    sides = [
        Side(name, _place(before, share), None if after is None else _place(after, share))
        for name, share in zip(PLACES, SHARES, strict=True)
    ]
    return Completions(updates, tuple(sides), False)


def _by_prompt(texts: Sequence[ShownText]) -> dict[str, list[ShownText]]:
    groups: dict[str, list[ShownText]] = {}
    for text in texts:
        groups.setdefault(text.prompt, []).append(text)
    return groups


def _opposite(prompt: str, before: Sequence[ShownText], after: Sequence[ShownText]) -> Side:
    means = _mean([text.reward for text in before]), _mean([text.reward for text in after])
    return Side(prompt, _middle(before), _middle(after), means)


def _means(before: Sequence[ShownText], after: Sequence[ShownText]) -> list[MeanPair]:
    names = dict.fromkeys(name for text in (*before, *after) for name in text.rewards)
    return [
        MeanPair("reward", _mean([text.reward for text in before]), _mean([text.reward for text in after])),
        *(
            MeanPair(name, *(_mean([text.rewards.get(name) for text in side]) for side in (before, after)))
            for name in names
        ),
        MeanPair("tokens", _mean([text.length for text in before]), _mean([text.length for text in after])),
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return float(np.mean(numbers)) if numbers else None


def _ordered(texts: Sequence[ShownText]) -> list[ShownText]:
    return sorted(texts, key=lambda text: -np.inf if text.reward is None else text.reward)


def _middle(texts: Sequence[ShownText]) -> ShownText | None:
    return _place(_ordered(texts), 0.5) if texts else None


def _place(ordered: Sequence[ShownText], share: float) -> ShownText:
    return ordered[round(share * (len(ordered) - 1))]


MOST_GROUPS, MOST_MEMBERS = 3, 8
"""Groups of a rollout to show, and completions of each."""
READ = 60
"""Files of completions to read for the distributions, evenly spread over the run."""
LONGEST = 4000
"""Characters of a text to show."""
LONGEST_CELL = 300
"""Characters of a column's value to show."""
MOST_MESSAGES = 60
"""Messages of an episode to show."""
PERCENTILES = (5, 25, 50, 75, 95)
DAMAGED = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""What a row or file of another form than is written raises."""


@dataclass(frozen=True)
class Spread:
    """A quantity at several updates: `percentiles` float64 [updates, 5]; all values at the first and last update."""

    name: str
    updates: NDArray[np.float64]
    percentiles: NDArray[np.float64]
    first: NDArray[np.float64]
    last: NDArray[np.float64]


@dataclass(frozen=True)
class ScoredPair:
    """A held-out pair. row: its name. scores: (update, chosen, rejected) at the first and last evaluation."""

    row: str
    prompt: str
    chosen: str
    rejected: str
    scores: tuple[tuple[int, float, float], ...]


def completions(
    stage: ReportedStage, problems: list[str]
) -> tuple[Completions | None, RolloutGroups | None, list[Spread]]:
    """Return completions to show before and after, groups of the newest rollout, and distributions in rollouts."""
    files = stage.files.samples("update")
    steps = list(files)
    if len(steps) > READ:
        steps = [steps[i] for i in np.unique(np.linspace(0, len(steps) - 1, READ).astype(int))]
    # A file is numbered by the updates before its rollout; metrics.jsonl has its metrics at the next update.
    sampled = {step + 1: _texts(files, "update", step, problems) for step in steps}
    rollouts = {step: texts for step, texts in sampled.items() if texts}
    spreads = []
    if rollouts:
        spreads = [
            _spread("reward", rollouts, lambda text: text.reward),
            _spread("length", rollouts, lambda text: text.length),
        ]
    opposite = fixed_prompts(stage, problems, "evaluation") or (_of_rollouts(rollouts) if rollouts else None)
    newest = _groups(max(rollouts), rollouts[max(rollouts)]) if rollouts else None
    return opposite, newest, [spread for spread in spreads if spread is not None]


def _groups(update: int, texts: Sequence[ShownText]) -> RolloutGroups | None:
    """Return the groups of a rollout whose advantages differ most; None where nothing has an advantage."""
    groups: list[tuple[float, CompletionGroup]] = []
    for prompt, members in _by_prompt(texts).items():
        advantages = [text.advantage for text in members if text.advantage is not None]
        if not advantages:
            continue
        ordered = sorted(members, key=lambda text: -(text.advantage or 0.0))
        shown = ordered if len(ordered) <= MOST_MEMBERS else [*ordered[: MOST_MEMBERS - 1], ordered[-1]]
        group = CompletionGroup(prompt, members[0].columns, tuple(shown), len(ordered) - len(shown))
        groups.append((max(advantages) - min(advantages), group))
    groups.sort(key=lambda item: -item[0])
    return RolloutGroups(update, tuple(group for _, group in groups[:MOST_GROUPS])) if groups else None


def fixed_prompts(stage: ReportedStage, problems: list[str], name: str) -> Completions | None:
    """Pair the first completions of fixed prompts with the trained model's. name: "evaluation" or "preview"."""
    files = stage.files.samples(name)
    read = [(step, _texts(files, name, step, problems)) for step in _ends(stage, files)]
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


def _of_rollouts(rollouts: Mapping[int, Sequence[ShownText]]) -> Completions:
    """Pair the first rollout with the last one, by shared prompts, else by quantile of the reward."""
    first, last = min(rollouts), max(rollouts)
    late = rollouts[last] if last != first else None
    shared = None if late is None else same_prompts((first, last), rollouts[first], late)
    return shared or same_places((first, last), rollouts[first], late)


def scored_pairs(stage: ReportedStage) -> list[ScoredPair]:
    """Return the pairs that the stage's evaluations stored."""
    files = stage.files.samples("evaluation")
    scores: dict[tuple[str, str, str, str], list[tuple[int, float, float]]] = {}
    for step in _ends(stage, files):
        for row in files[step]:
            if all(isinstance(row.get(f"{side}_score"), float) for side in ("chosen", "rejected")):
                prompt, chosen, rejected = (
                    _shown(row.get(part)) for part in ("prompt", "chosen", "rejected")
                )
                key = (Path(_shown(row.get("row"))).name, prompt, chosen, rejected)
                scores.setdefault(key, []).append((step, row["chosen_score"], row["rejected_score"]))
    return [ScoredPair(*texts, tuple(pair_scores)) for texts, pair_scores in scores.items()]


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
        return {"prompt_rewards": [_optional(float, value) for value in rewards]}
    return _row_values(content)


def _row_values(content: Mapping[str, Any]) -> dict[str, Any]:
    """Take the rewards or losses of the rows of the first set, or the number of its pairs."""
    rows: Sequence[Mapping[str, Any]] = content["rows"]
    rows = [row for row in rows if row.get("set") == rows[0].get("set")]
    # The implicit rewards of KTO's rows are no rewards of prompts: those of bad replies are to fall.
    is_implicit = any(name.endswith("rewards/chosen") for name in content.get("metrics") or ())
    for value, name in (("reward", "prompt_rewards"), ("loss", "row_losses")):
        if not (value == "reward" and is_implicit) and any(value in row for row in rows):
            return {name: [_optional(float, row[value]) for row in rows]}
    return {"pairs": len(rows)} if any("chosen" in row for row in rows) else {}


def _score_distributions(content: Mapping[str, Any]) -> dict[str, Any]:
    edges = [float(x) for x in content["scores"]["edges"]]
    counts = {side: [float(x) for x in content["scores"][side]] for side in ("chosen", "rejected")}
    if any(len(count) != len(edges) - 1 for count in counts.values()):
        raise ValueError
    bins = [
        {key: float(row[key]) for key in ("confidence", "right", "pairs")} for row in content["calibration"]
    ]
    return {"scores": {"edges": edges, **counts}, "calibration": bins}


def _texts(
    files: Mapping[int, Sequence[Mapping[str, Any]]], name: str, step: int, problems: list[str]
) -> list[ShownText]:
    """Return the completions of a file; name it once in `problems` if some have another form."""
    texts: list[ShownText] = []
    odd = 0
    for row in files[step]:
        try:
            if "completion" in row:
                texts.append(_text(row))
        except DAMAGED:
            odd += 1
    if odd:
        problems.append(f"samples/{name}-{step:06d}.jsonl: {odd} damaged row{'s' * (odd > 1)} left out")
    return texts


def _text(row: Mapping[str, Any]) -> ShownText:
    reward = _optional(float, row.get("reward"))
    rewards = {name: _optional(float, value) for name, value in (row.get("rewards") or {}).items()}
    columns = row.get("columns") or {}
    return ShownText(
        _shown(row.get("prompt")),
        _shown(_reply(row["completion"])),
        reward,
        {} if list(rewards.values()) == [reward] else rewards,
        _optional(int, row.get("length")),
        row.get("finished") is not False,
        columns={name: _shown(_written(value), LONGEST_CELL) for name, value in columns.items()},
        advantage=_optional(float, row.get("advantage")),
        **(_episode(row) if "turns" in row else {}),
    )


def _optional(make: Callable[[Any], Any], value: Any) -> Any:
    return None if value is None else make(value)


def _reply(completion: Any) -> Any:
    """Return the content of a reply that is a single message of the assistant, without its role."""
    if isinstance(completion, list) and len(completion) == 1:
        (message,) = completion
        if message["role"] == "assistant" and isinstance(message.get("content"), str):
            return message["content"]
    return completion


def _episode(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `ShownText` that only an episode has."""
    turns = row["turns"]
    asked = [_message(message) for message in row["prompt"]]
    replies = [_message(message) for message in row["completion"]]
    assistant = [i for i, message in enumerate(replies) if message.role == "assistant"]
    recorded = [turn["message"] for turn in turns if turn.get("message") in assistant]
    written = recorded if len(recorded) == len(turns) else assistant
    if len(written) == len(turns):  # else it is not known which of them the environment added
        for place, (i, turn) in enumerate(zip(written, turns, strict=True), 1):
            tokens, reward = _optional(int, turn.get("tokens")), _optional(float, turn.get("reward"))
            replies[i] = replace(replies[i], turn=place, tokens=tokens, reward=reward)
        for i in set(assistant) - set(written):
            replies[i] = replace(replies[i], added=True)
    shown = [*asked, *replies]
    return {
        "messages": tuple(shown[:MOST_MESSAGES]),
        "asked": len(asked),
        "left_out": max(len(shown) - MOST_MESSAGES, 0),
        "failure": _shown(row.get("failure")),
    }


def _message(message: Mapping[str, Any]) -> Message:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return Message(
        " ".join(filter(None, (message["role"], message.get("name")))),
        _shown(message.get("content")),
        tuple(_shown(f"{call.get('name')}({_written(call.get('arguments'))})") for call in calls),
        tuple(map(_shown, message.get("call_errors") or ())),
    )


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _shown(value: Any, longest: int = LONGEST) -> str:
    """Return a text, or a conversation as one text, cut to `longest` characters."""
    if isinstance(value, list):
        value = "\n".join(
            f"{turn.get('role', '')}: {turn.get('content') or ''}" if isinstance(turn, dict) else str(turn)
            for turn in value
        )
    text = "" if value is None else str(value)
    return text if len(text) <= longest else f"{text[:longest]}… ({len(text):,} characters)"


def _spread(name: str, rollouts: Mapping[int, Sequence[ShownText]], quantity: Any) -> Spread | None:
    values = {
        step: np.array(numbers, np.float64)
        for step, texts in rollouts.items()
        if (numbers := [value for text in texts if (value := quantity(text)) is not None])
    }
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
