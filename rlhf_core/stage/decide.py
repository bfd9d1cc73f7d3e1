"""Decide about a stage: begin, continue, extend or skip it, or refuse it with reasons.

`decide` compares what a stage was begun as with what is asked for now. `rlhf run` and `rlhf check` ask it for every
stage, `--reuse` for the stages of another run, and a training loop for the checkpoint that it resumes. Nothing here
reads a file or a device.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from rlhf_core.contracts.trainers import WSD_DECAY
from rlhf_core.errors import counted
from rlhf_core.stage.spec import LENGTH, Difference, Differences, Record, StageSpec, accept_names

Action = Literal["begin", "continue", "extend", "skip", "refuse"]
_SAME_RATES = ("constant", "wsd", None)
"""Schedules whose learning rates do not all depend on the length of the run, as those of functions may; none: of a
trainer that makes its own."""


class Begun(NamedTuple):
    """A stage that was begun, as its directory or one of its checkpoints tells.

    record: what it was begun as. made: updates before the newest checkpoint; None without one. total, per_epoch:
    updates of the whole run and of an epoch, as planned then; None where the trainer did not say.
    """

    record: Record
    done: bool = False
    made: int | None = None
    total: int | None = None
    per_epoch: float | None = None

    @property
    def untrained(self) -> bool:
        """Whether no update is kept."""
        return self.made is None and not self.done


class Decision(NamedTuple):
    """What to do with a stage. reasons: why it is refused, one line each. warnings: what to say if it is not.

    accepted: changes that would be refused, and that the request accepts by name. used: these names.
    """

    action: Action
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    accepted: tuple[Difference, ...] = ()
    used: frozenset[str] = frozenset()


def decide_all(
    specs: Sequence[StageSpec], begun: Mapping[str, Begun | None], accept: Collection[str] = ()
) -> dict[str, Decision]:
    """Decide about all stages of a run, so that a change in the last one is known before the first one trains.

    A stage that has read the output of one that would be extended is refused. begun: {stage: as it was begun}.
    accept: see `decide`.
    """
    decisions: dict[str, Decision] = {}
    for spec in specs:
        decision = decide(begun[spec.name], spec, accept)
        stale = [name for name in sorted(spec.reads & {*decisions}) if decisions[name].action == "extend"]
        if stale and decision.action not in ("begin", "refuse"):
            line = (
                f"stage '{spec.name}' was begun with the previous '{stale[0]}', which would now be trained "
                f"further: delete {spec.dir} to rerun it afterwards, or use another --dir"
            )
            decision = decision._replace(action="refuse", reasons=(line,))
        decisions[spec.name] = decision
    return decisions


def decide(
    begun: Begun | None, spec: StageSpec, accept: Collection[str] = (), total: int | None = None
) -> Decision:
    """Decide what to do with one stage.

    Inputs that do not exist yet are not compared: the stages that make them have not run.
    accept: names of changes to accept, see `Decision.accepted`. total: updates of the stage, where they are known
    already.
    """
    if begun is None:
        return Decision("begin")
    now, name = spec.record, f"stage '{spec.name}'"
    if not begun.done and (now["config"].get("checkpoints") or {}).get("resume") is False:
        line = f"{name} was begun before and starts over: checkpoints.resume is false"
        return Decision("begin", (), (line,))
    changes = spec.diff(begun.record)
    accepted, used, problems = _judge_refused(changes, begun, spec, accept)
    length = [change for change in changes.warned if change.field in LENGTH]
    if not problems:
        problems = _length_problems(begun, spec, total, length)
        if problems and not begun.done:
            return Decision("refuse", tuple(problems))
    if problems:
        state = "finished" if begun.done else "begun"
        problems.append(f"{name} was {state} with other settings: {_how_to_run(spec)}")
        return Decision("refuse", tuple(problems))
    action: Action = "continue"
    if begun.done:
        action = "extend" if length and not _same_length(begun.record, now) else "skip"
    lines = _warnings(begun, changes, accepted, name, action)
    return Decision(action, (), tuple(lines), tuple(accepted), frozenset(used))


def _judge_refused(
    changes: Differences, begun: Begun, spec: StageSpec, accept: Collection[str]
) -> tuple[list[Difference], set[str], list[str]]:
    """Return the changes that are accepted now, the names that accept them, and a line for each of the others.

    Those that were accepted before are none of them.
    """
    earlier = {each["field"] for each in spec.record.get("accepted", ())}
    wanted = {each: each.removeprefix(f"{spec.name}.") for each in accept}
    accepted: list[Difference] = []
    used: set[str] = set()
    problems: list[str] = []
    refused = changes.refused if begun.untrained else [*changes.refused, *changes.data]
    for change in refused:
        names = accept_names(change.field, begun.record, spec.record)
        chosen = [each for each, change_name in wanted.items() if change_name in names]
        if chosen:
            accepted.append(change)
            used.update(chosen)
        elif change.field not in earlier:
            problems.append(f"stage '{spec.name}'.{change}{_how_to_accept(names, done=begun.done)}")
    return accepted, used, problems


def _warnings(
    begun: Begun, changes: Differences, accepted: Sequence[Difference], name: str, action: Action
) -> list[str]:
    """Describe what is not as it was in a stage that is not refused."""
    lines = []
    versions = [change.said for change in changes.warned if change.said]
    fields = [str(change) for change in changes.warned if not change.said]
    if versions:
        lines.append(f"{name} was begun with {'; '.join(versions)}")
    if accepted:
        how = "is kept" if action == "skip" else f"continues after update {begun.made or 0}"
        lines.append(f"{name} {how} with what was accepted: {'; '.join(map(str, accepted))}")
    if fields and action != "skip":
        lines.append(f"{name} continues with other settings: {'; '.join(fields)}")
    if begun.untrained and changes.data:
        data = "; ".join(map(str, changes.data))
        lines.append(f"{name}.{data}; nothing has been trained on it yet (no checkpoint)")
    return lines


def begins_again(spec: StageSpec, attempt: Record | None) -> list[str]:
    """Say, in at most one line, that a stage begins again with other settings than a run of which nothing is kept.

    attempt: what that run computed; None: there was none. Versions of libraries are left out.
    """
    if attempt is None:
        return []
    changes = spec.diff(attempt)
    settings = [each for each in changes.warned if not each.said]
    differs = [str(each) for each in (*changes.refused, *settings, *changes.data)]
    if not differs:
        return []
    return [
        f"stage '{spec.name}': begins again, since nothing is kept of the run before, with other settings: "
        f"{'; '.join(differs)}"
    ]


def _how_to_run(spec: StageSpec) -> str:
    if spec.alone:
        return f"restore them, use another save_directory, or delete {spec.dir} to rerun it"
    return (
        f"restore them, use another --dir, or delete {spec.dir} to rerun it; --dir NEW --reuse {spec.run} takes over "
        "the stages that have not changed"
    )


def _how_to_accept(names: Sequence[str], *, done: bool) -> str:
    if not names:
        return ""
    what = "keep the stage, which was trained before that" if done else "continue with it"
    return f'; to {what}: --accept {shlex.quote(names[0])}, in Python accept=["{names[0]}"]'


def _length_problems(
    begun: Begun, spec: StageSpec, total: int | None, length: Sequence[Difference]
) -> list[str]:
    """Return a line for each field of the length that the stage cannot have. length: those that have changed."""
    reason = _why_not_as_long(begun, spec.record, total, changed=bool(length))
    if reason is None:
        return []
    return [f"stage '{spec.name}'.{change}: {reason}" for change in length] or [
        f"stage '{spec.name}': {reason}"
    ]


def _why_not_as_long(begun: Begun, now: Record, asked: int | None, *, changed: bool) -> str | None:
    """Explain why the stage cannot have the length that is asked for; None if it can.

    asked: its updates, where they are known. changed: whether the fields of the length are others than they were.
    """
    config, before = now["config"], begun.total
    if asked is None:
        if not changed or _same_length(begun.record, now):
            return None
        if before is None or begun.per_epoch is None:
            return "its trainer does not support extension" if begun.done else None
        asked = config.get("max_training_steps")
        if asked is None:
            asked = math.ceil(config["num_train_epochs"] * begun.per_epoch - 1e-6)
    if before is None:
        return None
    if begun.done and asked <= before:
        return f"the stage has made its {counted(before, 'updates')}; it can only be extended"
    made = begun.made
    if made is None:
        made = before if begun.done else 0
    if asked < made:
        done = counted(made, "updates")
        return f"it has made {done}, more than the requested {asked:,}; request at least as many"
    return _why_other_rates(config, made, before, asked)


def _why_other_rates(config: Mapping[str, Any], made: int, before: int, asked: int) -> str | None:
    """Explain why the updates that are made would have had other learning rates in a stage of this length."""
    scheduler = config.get("scheduler")
    warmup = config.get("warmup_steps") or 0
    # From this update on the rate falls, see `rlhf_core.optimizers.schedule`.
    falls = warmup + (1 - WSD_DECAY) * (min(before, asked) - warmup)
    has_fallen = scheduler == "wsd" and made - 1 > falls
    if asked == before or made == 0 or (scheduler in _SAME_RATES and not has_fallen):
        return None
    how = "had begun to fall" if has_fallen else "spreads the decay over the whole run"
    return (
        f'scheduler = "{scheduler}" {how}, so the updates already made would have had other rates; a run can be '
        'extended with scheduler = "constant"'
    )


def _same_length(before: Record, now: Record) -> bool:
    """Return whether the length is the same after all: epochs do not count where `max_training_steps` is set."""
    steps = before["config"].get("max_training_steps")
    return steps is not None and steps == now["config"].get("max_training_steps")
