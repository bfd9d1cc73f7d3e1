"""Decide about a stage: begin, continue, extend or skip it, or refuse it with reasons.

`decide` compares what a stage was begun as with what is asked for now. `rlhf run` and `rlhf check` ask it for every
stage, `--reuse` for the stages of another run, and a training loop for the checkpoint that it resumes. Nothing here
reads a file or a device.

A change is *refused* in the trainer, the seed, the fields that change what is computed, the inputs, and the code of
components. It is *warned of* in versions and the fields of `MAY_CHANGE`. It is *ignored* in the fields of `UNCOMPARED`
and in secrets.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rlhf_core.contracts.trainers import WSD_DECAY
from rlhf_core.errors import counted
from rlhf_core.hidden import HIDDEN

Record = Mapping[str, Any]
"""What a stage computes, as JSON: `trainer`, `seed`, `config` (nested), `inputs` {field: {path, reference, identity}},
`code` {field: {name, owner, hash}}, `versions` {distribution: version}; after accepted changes also `accepted`, a list
of {field, change, after_update, time}; with names of the hub, `hub` {name as written: the same with its commit}.
`rlhf_core.stage.identity` makes it."""
Action = Literal["begin", "continue", "extend", "skip", "refuse"]
UNCOMPARED = frozenset(
    {
        "logger",
        "progress_bar_type",
        "progress_metrics",
        "log_completions",
        "num_completions_to_print",
        "track_memory",
        "save_total_limit",
        "save_directory",
        "run_name",
        "trainer_prefix",
        "log_all_workers",
        "dataset_num_proc",
        "dataloader_num_workers",
        "platform",
    }
)
"""Fields of logging and saving, which may also differ between processes."""
LENGTH = ("max_training_steps", "num_train_epochs")
"""Fields of the training length; they may change if the updates already made stay the same."""
MAY_CHANGE = frozenset(
    {
        *LENGTH,
        "log_steps",
        "metrics",
        "report_steps",
        "log_grad_norms",
        "log_weights",
        "num_preview_samples",
        "previews",
        "save_steps",
        "save_interval_minutes",
        "training_time_limit",
        "verify",
        "offload",
        "checkpoints.last",
        "checkpoints.optimizer_state",
        "checkpoints.remove_loaded",
        "checkpoints.resume",
        "journal",
    }
)
"""Fields that may change during a run, with a warning; all processes of a job must have the same."""
_OF_CALLS = re.compile(
    r"(rewards\[\d+\]|environment)\.(timeout|processes|on_error|check)"
    r"|sampler\.(urls(\[\d+\])?|directory|timeout|patience|concurrency|probe_tolerance)"
)
"""How a reward, an environment or engines are called, which may change as well: it changes no value."""
_REWARD = re.compile(r"rewards\[(\d+)\]")
_EPISODES = ("max_turns", "max_tokens", "max_seconds", "weight", "history")
"""Options of an `environment` that say how episodes are held; changes of these cannot be accepted."""
_SAME_RATES = ("constant", "wsd", None)
"""Schedules whose learning rates do not all depend on the length of the run, as those of functions may; none: of a
trainer that makes its own."""


class Difference(NamedTuple):
    """One difference between two records.

    field: dotted. before, now: in words. said: the whole difference in words; empty: `before` and `now` describe it.
    """

    field: str
    before: str
    now: str
    said: str = ""

    def __str__(self) -> str:
        return self.said or f"{self.field}: then {self.before}, now {self.now}"


class Differences(NamedTuple):
    """Differences that make a new experiment (refused) or do not (warned), and changed training data (data)."""

    refused: list[Difference]
    warned: list[Difference]
    data: list[Difference]


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


class Request(NamedTuple):
    """A request to run one stage. now: what it would compute.

    reads: the stages whose outputs it reads. elsewhere: how a user names another directory, for messages. accept:
    names of changes to accept, see `Decision.accepted`. total: its updates, where they are known already.
    """

    name: str
    dir: Path
    now: Record
    reads: frozenset[str] = frozenset()
    elsewhere: str = "--dir"
    accept: frozenset[str] = frozenset()
    total: int | None = None


class Decision(NamedTuple):
    """What to do with a stage. reasons: why it is refused, one line each. warnings: what to say if it is not.

    accepted: changes that would be refused, and that the request accepts by name. used: these names.
    """

    action: Action
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    accepted: tuple[Difference, ...] = ()
    used: frozenset[str] = frozenset()


def decide_all(requests: Sequence[Request], begun: Mapping[str, Begun | None]) -> dict[str, Decision]:
    """Decide about all stages of a run, so that a change in the last one is known before the first one trains.

    A stage that has read the output of one that would be extended is refused. begun: {stage: as it was begun}.
    """
    decisions: dict[str, Decision] = {}
    for request in requests:
        decision = decide(begun[request.name], request)
        stale = [name for name in sorted(request.reads & {*decisions}) if decisions[name].action == "extend"]
        if stale and decision.action not in ("begin", "refuse"):
            line = (
                f"stage '{request.name}' was begun with the previous '{stale[0]}', which would now be trained "
                f"further: delete {request.dir} to rerun it afterwards, or use another --dir"
            )
            decision = decision._replace(action="refuse", reasons=(line,))
        decisions[request.name] = decision
    return decisions


def decide(begun: Begun | None, request: Request) -> Decision:
    """Decide what to do with one stage.

    Inputs that do not exist yet are not compared: the stages that make them have not run.
    """
    if begun is None:
        return Decision("begin")
    if not begun.done and (request.now["config"].get("checkpoints") or {}).get("resume") is False:
        line = f"stage '{request.name}' was begun before and starts over: checkpoints.resume is false"
        return Decision("begin", (), (line,))
    now, name = request.now, f"stage '{request.name}'"
    changes = compare(begun.record, now)
    refused, warned = [*changes.refused], changes.warned
    untrained = begun.made is None and not begun.done
    if not untrained:
        refused += changes.data
    earlier = {each["field"] for each in now.get("accepted", ())}
    wanted = {each.removeprefix(f"{request.name}.") for each in request.accept}
    accepted, problems = [], []
    used: set[str] = set()
    for change in refused:
        names = accept_names(change.field, begun.record, now)
        if chosen := wanted & {*names}:
            accepted.append(change)
            used |= {each for each in request.accept if each.removeprefix(f"{request.name}.") in chosen}
        elif change.field not in earlier:
            problems.append(f"{change}{_how_to_accept(names, done=begun.done)}")
    length = [change for change in warned if change.field in LENGTH]
    action: Action = "skip" if begun.done else "continue"
    too_long: list[str] = []
    if not problems and (reason := _why_not_as_long(begun, request, changed=bool(length))):
        too_long = [f"{name}.{change}: {reason}" for change in length] or [f"{name}: {reason}"]
    elif begun.done and length and not _same_length(begun.record, now):
        action = "extend"
    if problems or too_long:
        ending = (
            f"{name} was {'finished' if begun.done else 'begun'} with other settings: {_how_to_run(request)}"
        )
        lines = [*too_long, *(f"{name}.{problem}" for problem in problems)]
        return Decision("refuse", (*lines, *([ending] if problems or begun.done else [])))

    lines = []
    versions = [change.said for change in warned if change.said]
    fields = [str(change) for change in warned if not change.said]
    if versions:
        lines.append(f"{name} was begun with {'; '.join(versions)}")
    if accepted:
        how = "is kept" if action == "skip" else f"continues after update {begun.made or 0}"
        lines.append(f"{name} {how} with what was accepted: {'; '.join(map(str, accepted))}")
    if fields and action != "skip":
        lines.append(f"{name} continues with other settings: {'; '.join(fields)}")
    if untrained and changes.data:
        lines.append(
            f"{name}.{'; '.join(map(str, changes.data))}; nothing has been trained on it yet (no checkpoint)"
        )
    return Decision(action, (), tuple(lines), tuple(accepted), frozenset(used))


def compare(before: Record, now: Record) -> Differences:
    """Compare two records. Inputs that do not exist yet are not compared."""
    refused: list[Difference] = []
    warned: list[Difference] = []
    data: list[Difference] = []
    for key in ("trainer", "seed"):
        if before[key] != now[key]:
            refused.append(Difference(key, str(before[key]), str(now[key])))
    if before["trainer"] != now["trainer"]:
        return Differences(refused, warned, data)
    then, asked = flat(before["config"]), flat(now["config"])
    inputs = {*before["inputs"], *now["inputs"]}
    for key in sorted({*then, *asked}):
        if is_compared(key) and key not in inputs and then.get(key) != asked.get(key):
            part = warned if _may_change(key) else refused
            part.append(Difference(key, _shown(then.get(key)), _shown(asked.get(key))))
    for key in sorted(inputs):
        was, is_now = before["inputs"].get(key), now["inputs"].get(key)
        if was and is_now and _function(then.get(key)) != _function(asked.get(key)):
            refused.append(Difference(key, _shown(then.get(key)), _shown(asked.get(key))))
        elif difference := _changed_input(key, was, is_now, then, asked):
            (data if was and is_now and _root(key) == "train_data" else refused).append(difference)
    for key in sorted({*before["code"], *now["code"]}):
        was, is_now = before["code"].get(key), now["code"].get(key)
        if was and is_now and was["hash"] != is_now["hash"] and was["owner"] == is_now["owner"]:
            owner = f" ({was['owner']})" if was["owner"] else ""
            said = f"{key}: the code of '{is_now['name']}'{owner} has changed since"
            refused.append(Difference(key, was["hash"][:12], is_now["hash"][:12], said))
        elif bool(was) != bool(is_now) and key.startswith("rewards["):
            refused.append(Difference(key, *(_shown(each and each["name"]) for each in (was, is_now))))
    for name, was in sorted(before["versions"].items()):
        is_now = now["versions"].get(name, "absent")
        if was != is_now:  # a library installed since is no difference: the stage ran without it
            warned.append(Difference(name, was, is_now, f"{name} {was}, now {is_now}"))
    # An input and its parts say the same.
    return Differences(list({str(each): each for each in refused}.values()), warned, data)


def begins_again(stage: str, attempt: Record | None, now: Record) -> list[str]:
    """Say, in at most one line, that a stage begins again with other settings than a run of which nothing is kept.

    attempt: what that run computed; None: there was none. Versions of libraries are left out.
    """
    if attempt is None:
        return []
    changes = compare(attempt, now)
    settings = [each for each in changes.warned if not each.said]
    differs = [str(each) for each in (*changes.refused, *settings, *changes.data)]
    if not differs:
        return []
    return [
        f"stage '{stage}': begins again, since nothing is kept of the run before, with other settings: "
        f"{'; '.join(differs)}"
    ]


def accept_names(field: str, before: Record, now: Record) -> tuple[str, ...]:
    """Return the names under which a refused change can be accepted, such as "rewards.judge"; none if it cannot be.

    These are changes of a reward that both records have, by label; of an environment and its tools; and of the
    contents of the training data.
    """
    if match := _REWARD.match(field):
        labels = {_label(record["config"], int(match[1])) for record in (before, now)}
        label = labels.pop()
        if labels or label is None:
            return ()
        return tuple(dict.fromkeys((f"rewards.{label}", f"rewards.{label.rpartition(':')[2]}", match[0])))
    if _root(field) == "train_data":
        return ("train_data",) if all(field in record["inputs"] for record in (before, now)) else ()
    both = all(record["config"].get("environment") for record in (before, now))
    of_episodes = field.partition(".")[2] in _EPISODES
    return ("environment", "tools") if _root(field) == "environment" and both and not of_episodes else ()


def flat(value: Any, key: str = "") -> dict[str, Any]:
    """Return {dotted path: leaf}; an empty table or list is a leaf. Secrets are left out."""
    if value == HIDDEN or (isinstance(value, Mapping) and set(value) == {"env"}):
        return {}
    if isinstance(value, Mapping) and value:
        items = [(f"{key}.{k}" if key else str(k), v) for k, v in value.items()]
    elif isinstance(value, list | tuple) and value:
        items = [(f"{key}[{i}]", v) for i, v in enumerate(value)]
    else:
        return {key: None if value in ([], {}, ()) else value}
    return {k: v for name, item in items for k, v in flat(item, name).items()}


def is_compared(key: str) -> bool:
    """Return whether a field, by its dotted path, is compared at all."""
    return _root(key) not in UNCOMPARED and key != "seed"


def _how_to_run(request: Request) -> str:
    fix = f"restore them, use another {request.elsewhere}, or delete {request.dir} to rerun it"
    if request.elsewhere != "--dir":
        return fix
    return f"{fix}; --dir NEW --reuse {request.dir.parent} takes over the stages that have not changed"


def _how_to_accept(names: Sequence[str], *, done: bool) -> str:
    if not names:
        return ""
    what = "keep the stage, which was trained before that" if done else "continue with it"
    return f'; to {what}: --accept {shlex.quote(names[0])}, in Python accept=["{names[0]}"]'


def _label(config: Mapping[str, Any], index: int) -> str | None:
    rewards = config.get("rewards") or ()
    if index >= len(rewards):
        return None
    reward = rewards[index]
    if not isinstance(reward, Mapping):
        return str(reward)
    return str(reward.get("label") or str(reward.get("name")).rpartition("/")[2])


def _why_not_as_long(begun: Begun, request: Request, *, changed: bool) -> str | None:
    """Explain why the stage cannot have the length that is asked for; None if it can.

    changed: whether the fields of the length are others than they were.
    """
    config, before, asked = request.now["config"], begun.total, request.total
    if asked is None:
        if not changed or _same_length(begun.record, request.now):
            return None
        if before is None or begun.per_epoch is None:
            return "its trainer does not support extension" if begun.done else None
        limit = config.get("max_training_steps")
        asked = (
            int(limit)
            if limit is not None
            else math.ceil(config["num_train_epochs"] * begun.per_epoch - 1e-6)
        )
    if before is None:
        return None
    if begun.done and asked <= before:
        return f"the stage has made its {counted(before, 'updates')}; it can only be extended"
    made = begun.made if begun.made is not None else before if begun.done else 0
    if asked < made:
        done = counted(made, "updates")
        return f"it has made {done}, more than the requested {asked:,}; request at least as many"
    scheduler, warmup = config.get("scheduler"), config.get("warmup_steps") or 0
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


def _changed_input(
    key: str, was: Any, is_now: Any, then: Mapping[str, Any], asked: Mapping[str, Any]
) -> Difference | None:
    before, now = _words(was, then.get(key)), _words(is_now, asked.get(key))
    if was is None or is_now is None:
        return Difference(key, before, now)
    if is_now["identity"] is None or was["identity"] is None or is_now["identity"] == was["identity"]:
        return None
    shown_before, shown_now = (each["reference"] or each["path"] for each in (was, is_now))
    if shown_before == shown_now:
        return Difference(key, before, now, f"{key}: the contents of {shown_now} have changed since")
    said = f"{key}: then {shown_before}, now {shown_now}, and their contents differ"
    return Difference(key, before, now, said)


def _words(given: Any, written: Any) -> str:
    return _shown(written) if given is None or given["path"] else str(given["reference"])


def _root(key: str) -> str:
    return key.split(".")[0].split("[")[0]


def _may_change(key: str) -> bool:
    return bool({key, _root(key)} & MAY_CHANGE) or _OF_CALLS.fullmatch(key) is not None


def _function(value: Any) -> str | None:
    """Return the function of a `file.py:function`, whose file is an input."""
    return value.rpartition(":")[2] if isinstance(value, str) and ".py:" in value else None


def _shown(value: Any) -> str:
    return "not given" if value is None else json.dumps(value)
