"""Read and write PEFT directories, adapter_config.json and adapter_model.safetensors, and put adapters on models."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import BaseModel, Field, FiniteFloat, PositiveInt, ValidationError
from safetensors.numpy import save_file

from rlhf_core import hub
from rlhf_core.artifacts import ADAPTER_CONFIG, MANIFEST
from rlhf_core.errors import InputError, read_json_object, warn
from rlhf_core.models.hf_config import shown
from rlhf_core.models.lora import Lora, linear_modules
from rlhf_core.models.params import join, paths, split
from rlhf_core.models.safetensors import TensorFile

if TYPE_CHECKING:
    from rlhf_core.models.model import Model

CONFIG = ADAPTER_CONFIG
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
_HARMLESS = """
    alpha_pattern auto_mapping base_model_name_or_path bias ensure_weight_tying exclude_modules inference_mode
    init_lora_weights layers_pattern layers_to_transform loftq_config lora_alpha lora_dropout megatron_core
    modules_to_save peft_type peft_version qalora_group_size r rank_pattern revision runtime_config
    target_modules task_type use_dora use_rslora
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Fields that are read, or that do not affect what a saved adapter computes."""
CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
"""Initialisations that rewrite the base model's own weights."""


class AdapterFields(BaseModel):
    """The fields of an adapter_config.json that decide what the tensors compute."""

    r: PositiveInt | None = None
    lora_alpha: FiniteFloat = 8.0
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    use_rslora: bool | None = False
    use_dora: bool | None = False
    modules_to_save: list[str] | None = None
    alpha_pattern: dict[re.Pattern[str], FiniteFloat] | None = None


def read_config(directory: Path) -> dict[str, Any]:
    """Read the adapter's configuration. InputError names a field whose value cannot be honoured."""
    file = directory / CONFIG
    if not file.is_file():
        raise InputError(f"{directory}: no {CONFIG}: not an adapter of PEFT")
    config = read_json_object(file)
    problems = _problems(config)
    if problems:
        raise InputError(*(f"{file}: {problem}" for problem in problems))
    return config


def _problems(config: Mapping[str, Any]) -> list[str]:
    """Describe the fields of an adapter's configuration whose values cannot be honoured."""
    problems = []
    try:
        fields = AdapterFields.model_validate(config)
        other = [name for name in fields.modules_to_save or () if name not in ("score", "classifier")]
        if other:
            problems.append(f"modules_to_save {other} is not supported; merge it into the model first")
    except ValidationError as error:
        problems += [
            f"{each['loc'][0]} {shown(config[str(each['loc'][0])])}: {each['msg']}" for each in error.errors()
        ]
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
    return problems


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


def named(path: str | Path, revision: str | None = None) -> Base:
    """Name a model for its adapters, by a directory, a hub name or an hf:// name."""
    if not hub.is_hub_name(path):
        return Base(fixed_name(path), revision)
    name = hub.parse(str(path))
    return Base(name.repository, name.revision)


def for_head(config: Mapping[str, Any], head: str) -> dict[str, Any]:
    """Set the task in an adapter's configuration to `head`, and whether the head is saved with the adapter."""
    changed = dict(config)
    saved = config.get("modules_to_save") or []
    if head == "score":
        changed["task_type"] = "SEQ_CLS"
        if "score" not in saved:
            changed["modules_to_save"] = [*saved, "score"]
    elif config.get("task_type") == "SEQ_CLS" or saved:
        changed |= {"task_type": "CAUSAL_LM", "modules_to_save": None}
    return changed


def config_for(
    lora: Lora, names: Mapping[str, Sequence[str]], *, base: Base | None, head: str
) -> dict[str, Any]:
    """Make the adapter_config.json of an adapter of the model `base`. names: `Definition.module_names`."""
    revision = None if base is None else base.revision
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else base.named,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": _target_modules(lora, names),
        "modules_to_save": None,
        "use_rslora": lora.use_rslora,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    return for_head(config | ({} if revision is None else {"revision": revision}), head)


def _target_modules(lora: Lora, names: Mapping[str, Sequence[str]]) -> list[str] | str:
    """Name modules as PEFT does: by their last words; by a regular expression where a vision tower may have the same,
    and where only some layers are adapted.

    The expression also fits the text model that transformers makes of such a checkpoint by itself.
    """
    adapted = [
        name for target in lora.targets for i, name in enumerate(names[target]) if lora.adapts(target, i)
    ]
    prefix = adapted[0].partition("layers.")[0]
    start = re.escape(prefix)
    if prefix.startswith("model.") and prefix != "model.":
        start = rf"model\.({re.escape(prefix.removeprefix('model.'))})?"
    words = sorted({module.rpartition(".")[2] for module in adapted})
    if not lora.layers:
        return words if prefix == "model." else rf"{start}layers\.\d+\.(.*\.)?({'|'.join(words)})"
    numbers: dict[str, list[str]] = {}
    for module in adapted:
        number, _, within = module.removeprefix(f"{prefix}layers.").partition(".")
        numbers.setdefault(within, []).append(number)
    modules: dict[str, list[str]] = {}
    for within, each in numbers.items():
        modules.setdefault("|".join(each), []).append(re.escape(within))
    layers = (rf"({each})\.({'|'.join(within)})" for each, within in modules.items())
    return rf"{start}layers\.({'|'.join(layers)})"


def save(
    directory: Path,
    config: Mapping[str, Any],
    params: Mapping[str, Any],
    lora: Lora,
    names: Mapping[str, Sequence[str]],
) -> None:
    """Write the adapter's two files, float32.

    params: a nested dict of host arrays; only adapters and the reward head are written. names: as for `config_for`.
    """
    tensors: dict[str, np.ndarray] = {}
    for path, value in paths(params):
        if path[-1] in ("lora_a", "lora_b"):
            kind = "lora_A" if path[-1] == "lora_a" else "lora_B"
            target = ".".join(path[1:-2])
            for i, (module, part) in enumerate(zip(names[target], value, strict=True)):
                if lora.adapts(target, i):
                    tensors[f"{PREFIX}{module}.{kind}.weight"] = np.ascontiguousarray(part.T)
        elif path[0] == "score":
            tensors[f"{PREFIX}score.weight"] = np.ascontiguousarray(value.T)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    (directory / CONFIG).write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")


class StoredAdapter:
    """The tensors of one adapter directory, by module."""

    def __init__(self, directory: Path) -> None:
        """Raises InputError naming the file or tensor at fault."""
        self.directory, self.config = directory, read_config(directory)
        self.fields = AdapterFields.model_validate(self.config)
        file = directory / WEIGHTS
        if not file.is_file():
            raise InputError(f"{directory}: {WEIGHTS} is missing")
        self._reader = TensorFile(file)
        self._modules: dict[str, dict[str, str]] = {}
        """{module, such as "model.layers.0.self_attn.q_proj": {"lora_A", "lora_B", …: tensor}}"""
        self.score: str | None = None
        for name in self._reader.header:
            match = re.fullmatch(
                rf"{re.escape(PREFIX)}((?:\w+\.)+layers\.\d+\..+)\.(lora_A|lora_B|lora_magnitude_vector)(?:\.weight)?",
                name,
            )
            if match is not None:
                module, kind = match.groups()
                self._modules.setdefault(module, {})[kind] = name
            elif re.fullmatch(rf"{re.escape(PREFIX)}score(\.modules_to_save)?\.weight", name):
                self.score = name
            else:
                raise InputError(f"{file}: '{name}' does not belong to a layer that can be adapted")
            shape = self._reader.header[name]["shape"]
            if len(shape) != 2 and "lora_magnitude_vector" not in name:
                raise InputError(f"{file}: '{name}' has shape {shape}; it must be a matrix")
        dora = bool(self.fields.use_dora)
        for module, names in self._modules.items():
            lost = {"lora_A", "lora_B"} - set(names)
            if lost:
                raise InputError(f"{file}: {module} has no {' and no '.join(sorted(lost))}")
            if ("lora_magnitude_vector" in names) != dora:
                has = "has no" if dora else "has a"
                raise InputError(
                    f"{file}: {module} {has} lora_magnitude_vector, and in {CONFIG} use_dora is "
                    f"{str(dora).lower()}: fetch both again"
                )

    def on(self, model: Model, base: Base) -> Model:
        """Put this adapter on a model. An adapter of DoRA is merged into the weights, with a warning.

        base: the name of the model in the adapter's new configuration. Raises InputError where the adapter does not
        fit, and where the model has no place for its reward head.
        """
        if self.score is not None and model.definition.head != "score":
            raise InputError(f"{self.directory}: a reward model's adapter: load it with head='score'")
        shapes = model.definition.quantized_as(None).abstract_params()
        layers = dict(paths(shapes))
        names = model.definition.module_names()
        possible = linear_modules(shapes)
        renamed = self._rename({name for target in possible for name in names[target]})
        lora = self._lora_on({target: names[target] for target in possible})
        definition = model.definition.with_lora(lora)
        params = model.params
        if self.score is not None:
            params = {**params, "score": {"kernel": self._head(layers["score", "kernel"].shape)}}
        added: dict[str, Any] = {}
        for target in lora.targets:
            count, *sizes = layers["layers", *target.split("."), "kernel"].shape
            adapter = self._stacked(names[target], lora, (sizes[0], sizes[1]))
            if lora.dropout:
                adapter["lora_key"] = np.zeros((count, 2), np.uint32)
            inner: Any = added.setdefault("layers", {})
            for name in target.split("."):
                inner = inner.setdefault(name, {})
            inner["adapter"] = adapter
        params = jax.device_put(join(params, added), definition.shardings(model.mesh))
        same = not renamed and lora.rank == self.fields.r and not self.fields.alpha_pattern
        config = self._config_on(base) if same else config_for(lora, names, base=base, head=definition.head)
        adapted = dataclasses.replace(model, definition=definition, params=params, adapter=config)
        return self._merge_dora(adapted, names) if self.fields.use_dora else adapted

    def _lora_on(self, names: Mapping[str, Sequence[str]]) -> Lora:
        """Return the adapters that this one is on a model with these modules, {target: its name in each layer}."""
        unknown = set(self._modules).difference(*names.values())
        if unknown:
            raise InputError(
                f"{self.directory / WEIGHTS}: the base model has no linear layer {min(unknown)}; "
                "is this its base model?"
            )
        present = {
            t: tuple(i for i, name in enumerate(each) if name in self._modules) for t, each in names.items()
        }
        return dataclasses.replace(
            self._lora([target for target, own in present.items() if own]),
            layers=tuple((t, own) for t, own in present.items() if 0 < len(own) < len(names[t])),
        )

    def _head(self, shape: tuple[int, ...]) -> np.ndarray:
        """Read the reward head. shape: of the base model's. Raises InputError where it has another."""
        kernel = self._view(str(self.score)).T
        if kernel.shape != shape:
            raise InputError(
                f"{self.directory / WEIGHTS}: its reward head has shape {list(kernel.T.shape)}; the base model "
                f"takes {list(shape[::-1])}: is this its base model?"
            )
        return kernel

    def _config_on(self, base: Base) -> dict[str, Any]:
        """Return the configuration as it was read, with the name that the base model has now."""
        config = {**self.config, "base_model_name_or_path": base.named}
        if base.revision is not None or "revision" in config:
            config["revision"] = base.revision
        return config

    def _rename(self, known: Collection[str]) -> bool:
        """Give the modules the names that the model has now, and return whether they had others.

        The text model of a checkpoint with a vision tower may have been loaded by itself, or by an older transformers.
        """
        prefix = next(iter(known)).partition("layers.")[0]
        before = set(self._modules)
        for start in ("model.", "language_model.model."):
            renamed = {}
            for name, tensors in self._modules.items():
                other = prefix + name.removeprefix(start)
                renamed[other if other in known else name] = tensors
            self._modules = renamed
        return set(self._modules) != before

    def _merge_dora(self, adapted: Model, names: Mapping[str, Sequence[str]]) -> Model:
        """Merge the adapter of DoRA (Liu et al. 2024), and scale every output's weights to the adapter's magnitude."""
        warn(f"{self.directory}: merging the DoRA adapter into the model's weights")
        lora = adapted.definition.lora
        assert lora is not None
        model = adapted.merged()
        params = model.params
        for target in lora.targets:
            path = ("layers", *target.split("."), "kernel")
            kernel = dict(paths(params))[path]
            scaled = _with_lengths(kernel, self._magnitudes(names[target]))
            nested: Any = scaled
            for name in reversed(path):
                nested = {name: nested}
            params = join(split(params, frozenset([path]))[0], nested)
        return model.with_params(jax.device_put(params, model.definition.shardings(model.mesh)))

    def _view(self, name: str) -> np.ndarray:
        return np.asarray(self._reader.view(name), np.float32)

    def _lora(self, targets: Sequence[str]) -> Lora:
        """Describe the adapter. Its rank is the largest of any module; others are padded with zeros."""
        ranks = [self._reader.header[names["lora_A"]]["shape"][0] for names in self._modules.values()]
        if not ranks:
            raise InputError(f"{self.directory / WEIGHTS}: it has no lora_A and lora_B")
        of = self.fields
        rank = of.r or max(ranks)
        lora = Lora(rank, of.lora_alpha, of.lora_dropout, bool(of.use_rslora), tuple(targets))
        if set(ranks) == {lora.rank}:
            return lora
        largest = max(ranks)
        return Lora(largest, float(largest), lora.dropout, False, lora.targets)

    def _scale(self, module: str, rank: int) -> float:
        patterns = (self.fields.alpha_pattern or {}).items()
        named = (alpha for pattern, alpha in patterns if re.match(rf"(.*\.)?({pattern.pattern})$", module))
        alpha = next(named, self.fields.lora_alpha)
        return float(alpha / (rank**0.5 if self.fields.use_rslora else rank))

    def _stacked(self, modules: Sequence[str], lora: Lora, sizes: tuple[int, int]) -> dict[str, np.ndarray]:
        """Stack {"lora_a": float32 [layers, in, rank], "lora_b": float32 [layers, rank, out]}; absent layers are 0."""
        a = np.zeros((len(modules), sizes[0], lora.rank), np.float32)
        b = np.zeros((len(modules), lora.rank, sizes[1]), np.float32)
        for layer, module in enumerate(modules):
            names = self._modules.get(module)
            if names is None:
                continue
            down, up = self._view(names["lora_A"]), self._view(names["lora_B"])
            rank = down.shape[0]
            wanted = {"lora_A": (rank, sizes[0]), "lora_B": (sizes[1], rank)}
            for kind, tensor in (("lora_A", down), ("lora_B", up)):
                if tensor.shape != wanted[kind]:
                    raise InputError(
                        f"{self.directory / WEIGHTS}: '{names[kind]}' has shape {list(tensor.shape)}; the base model "
                        f"takes {list(wanted[kind])}: is this its base model?"
                    )
            scale = self._scale(module, rank)
            a[layer, :, :rank] = down.T
            b[layer, :rank] = up.T if scale == lora.scale else up.T * np.float32(scale / lora.scale)
        return {"lora_a": a, "lora_b": b}

    def _magnitudes(self, modules: Sequence[str]) -> np.ndarray:
        """Stack DoRA's magnitudes (Liu et al. 2024), float32 [layers, 1, out], NaN for a layer that has none."""
        magnitudes = {
            layer: self._view(self._modules[module]["lora_magnitude_vector"]).reshape(-1)
            for layer, module in enumerate(modules)
            if module in self._modules
        }
        out = np.full((len(modules), 1, len(next(iter(magnitudes.values())))), np.nan, np.float32)
        for layer, values in magnitudes.items():
            out[layer, 0] = values
        return out


def _with_lengths(kernel: jax.Array, magnitudes: np.ndarray) -> jax.Array:
    """Scale the columns of a kernel [..., in, out] to the lengths `magnitudes` [..., 1, out], except where NaN."""
    length = jnp.linalg.norm(kernel, axis=-2, keepdims=True)
    return jnp.where(jnp.isnan(magnitudes), kernel, kernel * (magnitudes / length))
