"""The specification of a stage: what it computes, on what and where, and how that differs from what is recorded.

A difference is *refused* in the trainer, the seed, the fields that change what is computed, the inputs, and the code of
components. It is *warned of* in versions and the fields of `MAY_CHANGE`. It is *ignored* in the fields of `UNCOMPARED`
and in secrets. Nothing here reads a file or a device.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_core.hidden import HIDDEN

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig
    from rlhf_core.contracts import Trainer

Record = Mapping[str, Any]
"""What a stage computes, as JSON: `trainer`, `seed`, `config` (nested), `inputs` {field: {path, reference, identity}},
`code` {field: {name, owner, hash}}, `versions` {distribution: version}; after accepted changes also `accepted`, a list
of {field, change, after_update, time}; with names of the hub, `hub` {name as written: the same with its commit}."""
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


@dataclass(frozen=True)
class StageSpec:
    """One stage as it is asked for, by a pipeline, by flags or from Python.

    dir: of the stage; run: of the whole run, with its events; `dir` itself for a trainer called from Python.
    written: the config with references to earlier stages, as the resolved pipeline shows it. config: the same with the
    paths of the artifacts. preview: `config` for a forecast: a model that this pipeline has yet to train is replaced by
    the one it starts from, which has the same shapes and tokenizer; a model of the hub by the directory of its
    config.json and tokenizer.
    references: {dotted field: (STAGE.OUTPUT, path of the artifact)}; it may not exist yet. objects: arguments from
    Python, by name. pins: {hf:// name as written: the same with its commit}, of the run.
    record: what the stage computes, as stage.json, checkpoints and journals hold it, with the hash of every input that
    exists; `rlhf_core.stage.identity.identified` fills it in.
    """

    name: str
    dir: Path
    run: Path
    trainer_name: str
    trainer: Trainer
    seed: int
    written: TrainerConfig
    config: TrainerConfig
    preview: TrainerConfig
    references: Mapping[str, tuple[str, Path]] = field(default_factory=dict)
    objects: Mapping[str, Any] = field(default_factory=dict)
    pins: Mapping[str, str] = field(default_factory=dict)
    record: Record = field(default_factory=dict)

    @property
    def reads(self) -> frozenset[str]:
        """The stages whose outputs it reads."""
        return frozenset(reference.partition(".")[0] for reference, _ in self.references.values())

    @property
    def alone(self) -> bool:
        """Whether the stage is its whole run, as of a trainer called from Python."""
        return self.run == self.dir

    def diff(self, recorded: Record) -> Differences:
        """Compare what is asked for with what was recorded. Inputs that do not exist yet are not compared."""
        now = self.record
        of_stage = [
            Difference(key, str(recorded[key]), str(now[key]))
            for key in ("trainer", "seed")
            if recorded[key] != now[key]
        ]
        if recorded["trainer"] != now["trainer"]:
            return Differences(of_stage, [], [])
        fields = list(_changed_fields(recorded, now))
        inputs = list(_changed_inputs(recorded, now))
        data = [each for each in inputs if _root(each.field) == "train_data" and each.said]
        refused = [
            *of_stage,
            *(each for each in fields if not _may_change(each.field)),
            *(each for each in inputs if each not in data),
            *_changed_code(recorded["code"], now["code"]),
        ]
        warned = [
            *(each for each in fields if _may_change(each.field)),
            *_changed_versions(recorded["versions"], now["versions"]),
        ]
        # An input and its parts say the same.
        return Differences(list({str(each): each for each in refused}.values()), warned, data)


def _changed_fields(recorded: Record, now: Record) -> Iterator[Difference]:
    """Yield the differences of fields, but for those of inputs."""
    then, asked = flat(recorded["config"]), flat(now["config"])
    inputs = {*recorded["inputs"], *now["inputs"]}
    for key in sorted({*then, *asked}):
        if is_compared(key) and key not in inputs and then.get(key) != asked.get(key):
            yield Difference(key, _shown(then.get(key)), _shown(asked.get(key)))


def _changed_inputs(recorded: Record, now: Record) -> Iterator[Difference]:
    then, asked = flat(recorded["config"]), flat(now["config"])
    for key in sorted({*recorded["inputs"], *now["inputs"]}):
        was, is_now = recorded["inputs"].get(key), now["inputs"].get(key)
        if was and is_now and _function(then.get(key)) != _function(asked.get(key)):
            yield Difference(key, _shown(then.get(key)), _shown(asked.get(key)))
            continue
        change = _changed_input(key, was, is_now, then, asked)
        if change is not None:
            yield change


def _changed_code(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    for key in sorted({*recorded, *now}):
        was, is_now = recorded.get(key), now.get(key)
        if was and is_now:
            if was["hash"] != is_now["hash"] and was["owner"] == is_now["owner"]:
                owner = f" ({was['owner']})" if was["owner"] else ""
                said = f"{key}: the code of '{is_now['name']}'{owner} has changed since"
                yield Difference(key, was["hash"][:12], is_now["hash"][:12], said)
        elif key.startswith("rewards["):
            yield Difference(key, *(_shown(each and each["name"]) for each in (was, is_now)))


def _changed_versions(recorded: Mapping[str, str], now: Mapping[str, str]) -> Iterator[Difference]:
    """Yield other versions. A library installed since is no difference: the stage ran without it."""
    for name, was in sorted(recorded.items()):
        is_now = now.get(name, "absent")
        if was != is_now:
            yield Difference(name, was, is_now, f"{name} {was}, now {is_now}")


def accept_names(field: str, before: Record, now: Record) -> tuple[str, ...]:
    """Return the names under which a refused change can be accepted, such as "rewards.judge"; none if it cannot be.

    These are changes of a reward that both records have, by label; of an environment and its tools; and of the
    contents of the training data.
    """
    match = _REWARD.match(field)
    if match:
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


def _label(config: Mapping[str, Any], index: int) -> str | None:
    rewards = config.get("rewards") or ()
    if index >= len(rewards):
        return None
    reward = rewards[index]
    if not isinstance(reward, Mapping):
        return str(reward)
    return str(reward.get("label") or str(reward.get("name")).rpartition("/")[2])


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
