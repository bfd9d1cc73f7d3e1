"""Compare two records of an experiment, and decide which differences make them different experiments.

A record has three parts. A change is *refused* in the trainer, the seed, the fields that change what is computed, the
inputs, and the code of components. It is *warned of* in versions and the fields of `MAY_CHANGE`. It is *ignored* in
the fields of `UNCOMPARED` and in secrets.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from rlhf_core.data.source import digest as hashed
from rlhf_core.hidden import HIDDEN

Record = Mapping[str, Any]
"""JSON: `trainer`, `seed`, `config` (nested), `inputs` {field: {path, reference, identity}}, `code` {field: {name,
owner, hash}}, `versions` {distribution: version}; after accepted changes also `accepted`, a list of {field, change,
after_update, time}."""
UNCOMPARED = frozenset(
    {
        "logger",
        "use_wandb",
        "progress_bar_type",
        "progress_metrics",
        "log_completions",
        "num_completions_to_print",
        "track_memory",
        "save_total_limit",
        "save_directory",
        "dataset_num_proc",
    }
)
"""Fields of logging and saving, which may also differ between processes."""
LENGTH = ("max_training_steps", "num_train_epochs")
"""Fields of the training length; they may change if the updates already made stay the same."""
MAY_CHANGE = frozenset(
    {
        *LENGTH,
        "log_steps",
        "num_preview_samples",
        "save_steps",
        "save_interval_minutes",
        "training_time_limit",
        "verify",
    }
)
"""Fields that may change during a run, with a warning; all processes of a job must have the same."""
_OF_CALLS = re.compile(r"(rewards\[\d+\]|environment)\.(timeout|processes|on_error|check)")
"""How a reward or an environment is called, which may change as well: it changes no value."""
_REWARD = re.compile(r"rewards\[(\d+)\]")
_EPISODES = ("max_turns", "max_tokens", "max_seconds", "weight", "history")
"""Options of an `environment` that say how episodes are held; changes of these cannot be accepted."""
WHOLE_RUN = ("linear", "cosine")
"""Schedules whose learning rates all depend on the length of the run."""


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


def digest(record: Record) -> str:
    """Hash the refused part of a record, without the training data, which are compared by row."""
    config = {k: v for k, v in flat(record["config"]).items() if is_compared(k) and not _may_change(k)}
    identity = {
        "trainer": record["trainer"],
        "seed": record["seed"],
        "config": {k: _function(v) if k in record["inputs"] else v for k, v in config.items()},
        "inputs": {k: v["identity"] for k, v in record["inputs"].items() if not is_training_data(k)},
        "code": {k: v["hash"] for k, v in record["code"].items()},
    }
    return hashed(json.dumps(identity, sort_keys=True))


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
            (data if was and is_now and is_training_data(key) else refused).append(difference)
    for key in sorted({*before["code"], *now["code"]}):
        was, is_now = before["code"].get(key), now["code"].get(key)
        if was and is_now and was["hash"] != is_now["hash"] and was["owner"] == is_now["owner"]:
            owner = f" ({was['owner']})" if was["owner"] else ""
            said = f"{key}: the code of '{is_now['name']}'{owner} has changed since"
            refused.append(Difference(key, was["hash"][:12], is_now["hash"][:12], said))
        elif bool(was) != bool(is_now) and key.startswith("rewards["):
            names = (_shown(each and each["name"]) for each in (was, is_now))
            refused.append(Difference(key, *names))
    for name in sorted({*before["versions"]}):
        was, is_now = before["versions"][name], now["versions"].get(name, "absent")
        if was != is_now:  # a library installed since is no difference: the stage ran without it
            warned.append(Difference(name, was, is_now, f"{name} {was}, now {is_now}"))
    return Differences(_once(refused), warned, data)


def is_training_data(field: str) -> bool:
    return root(field) == "train_data"


def accept_names(field: str, before: Record, now: Record) -> tuple[str, ...]:
    """Return the names under which a refused change can be accepted, such as "rewards.judge"; none if it cannot be.

    These are changes of a reward that both records have, by label, and of an environment and its tools.
    """
    if match := _REWARD.match(field):
        labels = {_label(record["config"], int(match[1])) for record in (before, now)}
        label = labels.pop()
        if labels or label is None:
            return ()
        return tuple(dict.fromkeys((f"rewards.{label}", f"rewards.{label.rpartition(':')[2]}", match[0])))
    both = all(record["config"].get("environment") for record in (before, now))
    of_episodes = field.partition(".")[2] in _EPISODES
    return ("environment", "tools") if root(field) == "environment" and both and not of_episodes else ()


def _label(config: Mapping[str, Any], index: int) -> str | None:
    rewards = config.get("rewards") or ()
    if index >= len(rewards):
        return None
    reward = rewards[index]
    if not isinstance(reward, Mapping):
        return str(reward)
    return str(reward.get("label") or str(reward.get("name")).rpartition("/")[2])


def fixed_length(config: Mapping[str, Any], before: int, asked: int, made: int) -> str | None:
    """Explain why a run of `before` updates, `made` of which are made, cannot have `asked`; None if it can."""
    if asked < made:
        return too_short(made, asked)
    scheduler = config.get("scheduler")
    warmup = config.get("warmup_steps") or 0
    # From this update on the rate falls, see `rlhf_core.optimizers.schedule`.
    falls = warmup + 0.9 * (min(before, asked) - warmup)
    if scheduler not in WHOLE_RUN and not (scheduler == "wsd" and before != asked and made - 1 > falls):
        return None
    how = "spreads the learning rate over the whole run" if scheduler in WHOLE_RUN else "had begun to fall"
    return (
        f'scheduler = "{scheduler}" {how}, so the updates already made would have had other rates; a run can be '
        'extended with scheduler = "constant"'
    )


def too_short(made: int, asked: int) -> str:
    return f"it has made {made:,} updates, more than the {asked:,} that are asked for; give at least as many"


def planned_updates(config: Mapping[str, Any], per_epoch: float) -> int:
    """Return the updates of a run with this configuration. per_epoch: updates per epoch."""
    limit = config.get("max_training_steps")
    return int(limit) if limit is not None else math.ceil(config["num_train_epochs"] * per_epoch - 1e-6)


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


def _once(differences: list[Difference]) -> list[Difference]:
    """Drop repeated differences: an input and its parts say the same."""
    return list({str(each): each for each in differences}.values())


def root(key: str) -> str:
    return key.split(".")[0].split("[")[0]


def _may_change(key: str) -> bool:
    return root(key) in MAY_CHANGE or _OF_CALLS.fullmatch(key) is not None


def _function(value: Any) -> str | None:
    """Return the function of a `file.py:function`, whose file is an input."""
    return value.rpartition(":")[2] if isinstance(value, str) and ".py:" in value else None


def is_compared(key: str) -> bool:
    return root(key) not in UNCOMPARED and key != "seed"


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


def _shown(value: Any) -> str:
    return "not given" if value is None else json.dumps(value)
