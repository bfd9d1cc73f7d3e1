"""Checks of what was made of the completions: rewards called again, and advantages computed again."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_audit.check import FAIL, Check, skipped, verdict_of
from rlhf_audit.subject import Subject
from rlhf_core import ADVANTAGE, InputError, RewardInputs, RunError, Stage
from rlhf_core.rewards.reward import Reward, open_rewards, score
from rlhf_core.rollouts import Rollout

CALLED = 32
"""How many completions are scored again."""
CLOSE = {"rel_tol": 1e-3, "abs_tol": 1e-3}
"""How close a reward is that is called again: a reward model packs it beside others, and rounds otherwise."""
LONGEST_CELL = 1000
"""Characters from which a column's value is cut in the journal."""


def advantages(subject: Subject, stage: Stage | str) -> Check:
    """Compute the advantages of the rollouts that were shown again, from the journal's rewards."""
    name = "advantages"
    component = subject.config.get("advantage")
    if not subject.numbers:
        return skipped(name, "the stage sampled nothing")
    if not isinstance(component, Mapping):
        return skipped(name, "the trainer has no advantages")
    if isinstance(stage, str):
        return skipped(name, stage)
    if subject.option("kl.place") == "reward" and subject.option("kl.beta"):
        return skipped(name, "the KL to the reference is part of the rewards, and is not written")
    each = subject.updates_per_rollout
    shown = subject.stage.samples("update")
    options = {key: value for key, value in component.items() if key != "name"}
    advantage = stage.registry.get(ADVANTAGE, component["name"], **options)
    compared, worst = 0, 0.0
    for entry in subject.rollouts():
        step = entry.rollout.number * (each or 1)
        if step not in shown:
            continue
        where = subject.dir / "samples" / f"update-{step:06d}.jsonl"
        rows = shown[step]
        if len(rows) != len(entry.rollout.total):
            why = f"{len(rows)} rows for {len(entry.rollout.total)} completions"
            return Check(name, FAIL, f"update {step}", why, str(where))
        again = entry.rollout.with_advantages(
            advantage, _labels(entry.rollout, subject), name=component["name"]
        )
        for row, said in enumerate(rows):
            found = _mean_advantage(again, row)
            apart = abs(found - float(said.get("advantage", math.nan)))
            compared += 1
            if not math.isclose(found, said.get("advantage", math.nan), rel_tol=1e-4, abs_tol=1e-5):
                why = f"{said.get('advantage')} was trained on, and the rewards give {found}"
                return Check(name, FAIL, f"{apart:.2g} apart", why, f"{where}, line {row + 1}")
            worst = max(worst, apart)
    if not compared:
        return skipped(name, "no rollout of the journal was shown in samples")
    return Check(
        name, "pass", f"{compared} completions, at most {worst:.1g} apart", values={"completions": compared}
    )


def _labels(rollout: Rollout, subject: Subject) -> list[Reward]:
    """Return the functions that scored a rollout, which are not called."""
    named = subject.config.get("rewards") or []
    weights = subject.config.get("reward_weights") or [
        each.get("weight", 1.0) if isinstance(each, Mapping) else 1.0 for each in named
    ]
    labels = list((rollout.samples_read[0].get("rewards") or {}) if rollout.samples_read else ())
    count = rollout.rewards.shape[1]
    # The environment's own reward, and functions from Python, are not among those that the config names.
    padded = [*weights, *[1.0] * (count - len(weights))][:count]
    if subject.config.get("environment") is not None and len(named) < count:
        padded = [float(subject.option("environment.weight") or 1.0), *weights][:count]
    return [Reward(labels[i] if i < len(labels) else str(i), float(padded[i]), None) for i in range(count)]


def _mean_advantage(rollout: Rollout, row: int) -> float:
    """Return the mean advantage over the tokens that the policy wrote, as samples have it."""
    advantage = rollout.advantages[row]
    return float(advantage[rollout.samples.mask[row]].mean()) if advantage.ndim else float(advantage)


def rewards(subject: Subject, stage: Stage | str, *, call: bool) -> Check:
    """Call the rewards of some completions again, twice. call: those that cost something, too."""
    name = "rewards"
    if not subject.numbers:
        return skipped(name, "the stage sampled nothing")
    if not subject.config.get("rewards"):
        return skipped(name, "no reward function is named in the configuration")
    if isinstance(stage, str):
        return skipped(name, stage)
    if subject.config.get("environment") is not None:
        return skipped(name, "the rewards of episodes come from their world")
    config: Any = stage.specification().config
    if len(config.rewards) < len(subject.config["rewards"]):
        return skipped(name, "functions that were given from Python, in memory, are not called again")
    try:
        functions = open_rewards(config.rewards, stage)
    except InputError as error:
        return skipped(name, f"they cannot be opened: {error.problems[0]}")
    chosen = list(_chosen(subject))
    if not chosen:
        return skipped(name, "no completion has all columns of its row")
    inputs = _inputs([rollout.samples_read[row] for rollout, row in chosen], chosen)
    apart, random, left_out = 0.0, [], []
    for column, reward in enumerate(functions):
        reason = _not_called(reward, call=call)
        if reason:
            left_out.append(f"'{reward.label}' {reason}")
            continue
        try:
            if hasattr(reward.function, "setup"):
                reward.function.setup(stage)
            first = score([reward], inputs)[:, 0]
            second = score([reward], inputs)[:, 0]
        except (InputError, RunError) as error:
            left_out.append(f"'{reward.label}' cannot be called: {str(error).splitlines()[0]}")
            continue
        if not all(map(_close, first, second)):
            random.append(reward.label)
            continue
        for (rollout, row), now in zip(chosen, first.tolist(), strict=True):
            then = float(rollout.rewards[row, column])
            if not _close(then, now):
                why = f"'{reward.label}' gave {then:.6g} then and {now:.6g} now"
                where = f"{subject.journal_file(rollout.number)}, completion {row}"
                return Check(name, FAIL, f"{len(chosen)} completions", why, where)
            if math.isfinite(now):
                apart = max(apart, abs(then - now))
    if random:
        left_out.append(f"'{random[0]}' gives other values for the same completions")
    if len(left_out) == len(functions):
        return skipped(name, "; ".join(left_out))
    number = f"{len(chosen)} completions called again, at most {apart:.1g} apart"
    if left_out:
        number += f"; not {'; '.join(left_out)}"
    return Check(name, verdict_of(""), number, values={"completions": len(chosen), "largest": apart})


def _not_called(reward: Reward, *, call: bool) -> str:
    """Return why a reward is not called again; empty where it is."""
    if hasattr(reward.function, "restore") and not hasattr(reward.function, "setup"):
        return "has a state that has moved on"
    inner = getattr(reward.function, "func", reward.function)
    costs = bool(getattr(inner, "costs", False)) or reward.asynchronous
    return "costs something to call: --call does" if costs and not call else ""


def _chosen(subject: Subject) -> Iterator[tuple[Rollout, int]]:
    """Yield (rollout, row) of completions that are spread over the journal, whose columns are whole."""
    count = len(subject.numbers)
    rollouts = {
        subject.numbers[i] for i in np.linspace(0, count - 1, min(count, CALLED)).astype(int).tolist()
    }
    per_rollout = -(-CALLED // len(rollouts))
    given = 0
    for entry in subject.rollouts():
        rollout = entry.rollout
        if rollout.number not in rollouts:
            continue
        for row in np.linspace(0, len(rollout.total) - 1, per_rollout).astype(int).tolist():
            columns = rollout.samples_read[row].get("columns") or {}
            cut = any(isinstance(value, str) and len(value) > LONGEST_CELL for value in columns.values())
            if not cut and given < CALLED:
                given += 1
                yield rollout, row


def _inputs(rows: Sequence[Mapping[str, Any]], chosen: Sequence[tuple[Rollout, int]]) -> RewardInputs:
    """Make what reward functions are called with."""
    names = dict.fromkeys(name for row in rows for name in row.get("columns") or {})
    ids = [
        [int(token) for token in rollout.samples.tokens[row, : int(rollout.samples.lengths[row])]]
        for rollout, row in chosen
    ]
    return RewardInputs(
        prompts=[row["prompt"] for row in rows],
        completions=[row["completion"] for row in rows],
        completion_ids=ids,
        columns={name: [(row.get("columns") or {}).get(name) for row in rows] for name in names},
    )


def _close(one: float, other: float) -> bool:
    """Compare two rewards; NaN is not scored."""
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return math.isclose(one, other, **CLOSE)


def shown_rewards(subject: Subject) -> Check:
    """Compare the completions and rewards that samples show with those of the journal."""
    name = "shown completions"
    shown = subject.stage.samples("update")
    each = subject.updates_per_rollout
    if not subject.numbers or not shown:
        return skipped(name, "no completion was shown")
    compared = 0
    for entry in subject.rollouts():
        step = entry.rollout.number * (each or 1)
        if step not in shown:
            continue
        where = subject.dir / "samples" / f"update-{step:06d}.jsonl"
        for line, (said, kept) in enumerate(zip(shown[step], entry.rollout.samples_read, strict=False), 1):
            for field in ("prompt", "completion", "rewards", "length", "finished"):
                # Numbers have passed through JSON in both.
                if json.dumps(said.get(field)) != json.dumps(kept.get(field)):
                    why = f"its {field} is not the journal's"
                    return Check(name, FAIL, f"update {step}", why, f"{where}, line {line}")
            compared += 1
    if not compared:
        return skipped(name, "no rollout of the journal was shown in samples")
    return Check(name, "pass", f"{compared} completions", values={"completions": compared})
