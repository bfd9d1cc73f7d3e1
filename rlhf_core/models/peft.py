"""Read and write PEFT directories: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from rlhf_core.artifacts import ADAPTER_CONFIG, MANIFEST
from rlhf_core.errors import InputError, read_json_object
from rlhf_core.models.hf_config import shown
from rlhf_core.models.lora import Lora
from rlhf_core.models.params import paths

CONFIG = ADAPTER_CONFIG
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
HARMLESS = frozenset(
    [
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "ensure_weight_tying",
        "exclude_modules",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_alpha",
        "lora_dropout",
        "megatron_core",
        "modules_to_save",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
        "use_dora",
        "use_rslora",
    ]
)
"""Fields that are read, or that do not affect what a saved adapter computes."""
LARGEST = 3e38
"""About the largest float32."""
MAY_BE_NULL = ("use_rslora", "use_dora", "modules_to_save", "alpha_pattern")
CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
"""Initialisations that rewrite the base model's own weights."""


def read_config(directory: Path) -> dict[str, Any]:
    """Read the adapter's configuration. InputError names a field whose value cannot be honoured."""
    file = directory / CONFIG
    if not file.is_file():
        raise InputError(f"{directory}: no {CONFIG}: not an adapter of PEFT")
    config = read_json_object(file)
    problems = _type_problems(config)
    if problems:
        raise InputError(*(f"{file}: {problem}" for problem in problems))
    if config.get("peft_type") != "LORA":
        problems.append(
            f"peft_type {shown(config.get('peft_type'))} is not supported; only LORA is supported"
        )
    for name, value in config.items():
        if name not in HARMLESS and value not in (None, False, 0, "", [], {}, "megatron.core"):
            problems.append(f"{name} {shown(value)} is not supported")
    if config.get("bias", "none") != "none":
        problems.append(f"bias {shown(config['bias'])} is not supported; only none is")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
        problems.append(
            f"init_lora_weights {start!r} has changed the base model; convert it to plain LoRA first"
        )
    other = [name for name in config.get("modules_to_save") or () if name not in ("score", "classifier")]
    if other:
        problems.append(f"modules_to_save {other} is not supported; merge it into the model first")
    if problems:
        raise InputError(*(f"{file}: {problem}" for problem in problems))
    return config


def _type_problems(config: Mapping[str, Any]) -> list[str]:
    """Describe the fields whose values have the wrong type."""

    def number(value: Any, least: float) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= LARGEST

    def pattern(value: Any) -> bool:
        try:
            re.compile(value)
        except (re.error, TypeError, OverflowError, RecursionError):
            return False
        return True

    rules: dict[str, tuple[str, Callable[[Any], bool]]] = {
        "r": ("a positive whole number", lambda v: isinstance(v, int) and number(v, 1)),
        "lora_alpha": ("a number other than 0", lambda v: number(v, -LARGEST) and v != 0),
        "lora_dropout": ("a number from 0 to 1", lambda v: number(v, 0) and v < 1),
        "use_rslora": ("true or false", lambda v: isinstance(v, bool)),
        "use_dora": ("true or false", lambda v: isinstance(v, bool)),
        "modules_to_save": (
            "a list of names",
            lambda v: isinstance(v, list) and all(isinstance(x, str) for x in v),
        ),
        "alpha_pattern": (
            "a table of numbers by regular expression",
            lambda v: isinstance(v, dict) and all(pattern(k) and number(x, -LARGEST) for k, x in v.items()),
        ),
    }
    return [
        f"{name} must be {kind}; it is {shown(config[name])}"
        for name, (kind, fits) in rules.items()
        if name in config and not fits(config[name]) and not (config[name] is None and name in MAY_BE_NULL)
    ]


class Base(NamedTuple):
    """The base model of an adapter: an absolute directory, or a hub name with its revision."""

    named: str
    revision: str | None


def base_of(directory: Path) -> Base:
    """Find the base model that an adapter names; paths are relative to the adapter's directory.

    A missing artifact is looked for in the adapter's own run, which may have moved.
    Raises InputError where the adapter names none.
    """
    config = read_config(directory)
    named = config.get("base_model_name_or_path")
    if not named or not isinstance(named, str):
        raise InputError(f"{directory / CONFIG}: base_model_name_or_path is missing: name the base model")
    revision = config.get("revision")
    if revision is not None and not isinstance(revision, str):
        raise InputError(f"{directory / CONFIG}: revision {revision!r} is not the name of a revision")
    local = (directory / named).resolve()
    place = local.parts[-3:]  # STAGE/artifacts/OUTPUT
    if not local.is_dir() and place[1:2] == ("artifacts",) and len(directory.resolve().parents) > 2:
        moved = directory.resolve().parents[2].joinpath(*place)
        local = moved if (moved / MANIFEST).is_file() and moved != directory.resolve() else local
    return Base(str(local) if local.is_dir() else fixed_name(named), revision)


def fixed_name(named: str | Path) -> str:
    """Name a base model so that copies of the adapter find it: by an absolute directory or a hub name.

    A directory in the hub's cache gets its hub name: other machines have no such directory.
    """
    directory = Path(named).expanduser()
    if not directory.is_dir():
        return str(named)
    cached = re.search(r"/models--([^/]+?)--([^/]+)/snapshots/[^/]+$", directory.resolve().as_posix())
    return "/".join(cached.groups()) if cached else str(directory.resolve())


def for_head(config: Mapping[str, Any], head: str) -> dict[str, Any]:
    """Set the task in an adapter's configuration to `head`, and whether the head is saved with the adapter."""
    changed, saved = dict(config), config.get("modules_to_save") or []
    if head == "score":
        changed["task_type"] = "SEQ_CLS"
        if "score" not in saved:
            changed["modules_to_save"] = [*saved, "score"]
    elif config.get("task_type") == "SEQ_CLS" or saved:
        changed |= {"task_type": "CAUSAL_LM", "modules_to_save": None}
    return changed


def config_for(
    lora: Lora,
    names: Mapping[str, Sequence[str]],
    *,
    base: str | None,
    head: str,
    revision: str | None = None,
) -> dict[str, Any]:
    """Make the adapter_config.json of an adapter of the model `base`. names: `Definition.module_names`."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(
            {name.rpartition(".")[2] for target in lora.targets for name in names[target]}
        ),
        "modules_to_save": None,
        "use_rslora": lora.use_rslora,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    return for_head(config | ({} if revision is None else {"revision": revision}), head)


def save(
    directory: Path, config: Mapping[str, Any], params: Mapping[str, Any], names: Mapping[str, Sequence[str]]
) -> None:
    """Write the adapter's two files, float32.

    params: a nested dict of host arrays; only adapters and the reward head are written. names: as for `config_for`.
    """
    tensors: dict[str, np.ndarray] = {}
    for path, value in paths(params):
        if path[-1] in ("lora_a", "lora_b"):
            kind = "lora_A" if path[-1] == "lora_a" else "lora_B"
            for module, part in zip(names[".".join(path[1:-2])], value, strict=True):
                tensors[f"{PREFIX}{module}.{kind}.weight"] = np.ascontiguousarray(part.T)
        elif path[0] == "score":
            tensors[f"{PREFIX}score.weight"] = np.ascontiguousarray(value.T)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    (directory / CONFIG).write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
