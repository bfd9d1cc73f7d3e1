"""Load a PEFT adapter directory onto a model."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_core.errors import InputError
from rlhf_core.models import peft
from rlhf_core.models.lora import Lora, linear_modules
from rlhf_core.models.model import Model
from rlhf_core.models.params import join, paths, split
from rlhf_core.models.peft import PREFIX, WEIGHTS, Base, read_config
from rlhf_core.models.safetensors import Reader


class Adapter:
    """The tensors of one adapter directory, by module."""

    def __init__(self, directory: Path) -> None:
        """Raises InputError naming the file or tensor at fault."""
        self.directory, self.config = directory, read_config(directory)
        file = directory / WEIGHTS
        if not file.is_file():
            raise InputError(f"{directory}: {WEIGHTS} is missing")
        self._reader = Reader(file)
        self._modules: dict[str, dict[str, str]] = {}
        """{module, such as "model.layers.0.self_attn.q_proj": {"lora_A", "lora_B", …: tensor}}"""
        self.score: str | None = None
        for name in self._reader.header:
            match = re.fullmatch(
                rf"{re.escape(PREFIX)}(model\.layers\.\d+\..+)\.(lora_A|lora_B|lora_magnitude_vector)(?:\.weight)?",
                name,
            )
            if match is not None:
                module, kind = match.groups()
                self._modules.setdefault(module, {})[kind] = name
            elif re.fullmatch(rf"{re.escape(PREFIX)}score(\.modules_to_save)?\.weight", name):
                self.score = name
            else:
                raise InputError(f"{file}: '{name}' does not belong to a layer that can be adapted")
            if len(shape := self._reader.header[name]["shape"]) != 2 and "lora_magnitude_vector" not in name:
                raise InputError(f"{file}: '{name}' has shape {shape}; it must be a matrix")
        dora = bool(self.config.get("use_dora"))
        for module, names in self._modules.items():
            if lost := {"lora_A", "lora_B"} - set(names):
                raise InputError(f"{file}: {module} has no {' and no '.join(sorted(lost))}")
            if ("lora_magnitude_vector" in names) != dora:
                has = "has no" if dora else "has a"
                raise InputError(
                    f"{file}: {module} {has} lora_magnitude_vector, and in {peft.CONFIG} use_dora is "
                    f"{str(dora).lower()}: fetch both again"
                )

    def on(self, model: Model, base: Base) -> Model:
        """Put this adapter on a model. An adapter of DoRA is merged into the weights, with a warning.

        base: the name of the model in the adapter's new configuration. Raises InputError where the adapter does not
        fit, and where the model has no place for its reward head.
        """
        if self.score is not None and model.definition.head != "score":
            raise InputError(f"{self.directory}: a reward model's adapter: load it with head='score'")
        layers = dict(paths(model.definition.abstract_params()))
        names, possible = model.definition.module_names(), linear_modules(model.params)
        if unknown := set(self._modules) - {name for target in possible for name in names[target]}:
            raise InputError(
                f"{self.directory / WEIGHTS}: the base model has no linear layer {min(unknown)}; "
                "is this its base model?"
            )
        lora = self._lora(
            [target for target in possible if not self._modules.keys().isdisjoint(names[target])]
        )
        definition = model.definition.with_lora(lora)
        params = model.params
        if self.score is not None:
            kernel = self._view(self.score).T
            if kernel.shape != layers["score", "kernel"].shape:
                raise InputError(
                    f"{self.directory / WEIGHTS}: its reward head has shape {list(kernel.T.shape)}; the base model "
                    f"takes {list(layers['score', 'kernel'].shape[::-1])}: is this its base model?"
                )
            params = {**params, "score": {"kernel": kernel}}
        added: dict[str, Any] = {}
        whole = True
        for target in lora.targets:
            count, *sizes = layers["layers", *target.split("."), "kernel"].shape
            whole = whole and self._modules.keys() >= set(names[target])
            adapter = self._stacked(names[target], lora, (sizes[0], sizes[1]))
            if lora.dropout:
                adapter["lora_key"] = np.zeros((count, 2), np.uint32)
            inner: Any = added.setdefault("layers", {})
            for name in target.split("."):
                inner = inner.setdefault(name, {})
            inner["adapter"] = adapter
        params = jax.device_put(join(params, added), definition.shardings(model.mesh))
        same = whole and lora.rank == self.config.get("r") and not self.config.get("alpha_pattern")
        if same:
            config = {**self.config, "base_model_name_or_path": base.named}
            if base.revision is not None or "revision" in config:
                config["revision"] = base.revision
        else:
            head = definition.head
            config = peft.config_for(lora, names, base=base.named, head=head, revision=base.revision)
        adapted = dataclasses.replace(model, definition=definition, params=params, adapter=config)
        return self._merge_dora(adapted, names) if self.config.get("use_dora") else adapted

    def _merge_dora(self, adapted: Model, names: Mapping[str, Sequence[str]]) -> Model:
        """Merge the adapter of DoRA (Liu et al. 2024), and scale every output's weights to the adapter's magnitude."""
        warnings.warn(f"{self.directory}: merging the DoRA adapter into the model's weights", stacklevel=4)
        lora = adapted.definition.lora
        assert lora is not None
        model = adapted.merged()
        params = model.params
        for target in lora.targets:
            path = ("layers", *target.split("."), "kernel")
            kernel = dict(paths(params))[path]
            scaled = _with_lengths(kernel, self._magnitudes(names[target]))
            params = join(split(params, frozenset([path]))[0], _nested(path, scaled))
        return model.with_params(jax.device_put(params, model.definition.shardings(model.mesh)))

    def _view(self, name: str) -> np.ndarray:
        return np.asarray(self._reader.view(name), np.float32)

    def _lora(self, targets: Sequence[str]) -> Lora:
        """Describe the adapter. Its rank is the largest of any module; others are padded with zeros."""
        ranks = [self._reader.header[names["lora_A"]]["shape"][0] for names in self._modules.values()]
        if not ranks:
            raise InputError(f"{self.directory / WEIGHTS}: it has no lora_A and lora_B")
        config = self.config
        lora = Lora(
            rank=int(config.get("r", max(ranks))),
            alpha=float(config.get("lora_alpha", 8)),
            dropout=float(config.get("lora_dropout", 0.0)),
            use_rslora=bool(config.get("use_rslora", False)),
            targets=tuple(targets),
        )
        if set(ranks) == {lora.rank}:
            return lora
        largest = max(ranks)
        return Lora(largest, float(largest), lora.dropout, False, lora.targets)

    def _scale(self, module: str, rank: int) -> float:
        alpha = self.config.get("lora_alpha", 8)
        for pattern, value in (self.config.get("alpha_pattern") or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                alpha = value
                break
        return float(alpha / (rank**0.5 if self.config.get("use_rslora") else rank))

    def _stacked(self, modules: Sequence[str], lora: Lora, sizes: tuple[int, int]) -> dict[str, np.ndarray]:
        """Stack {"lora_a": float32 [layers, in, rank], "lora_b": float32 [layers, rank, out]}; absent layers are 0."""
        a = np.zeros((len(modules), sizes[0], lora.rank), np.float32)
        b = np.zeros((len(modules), lora.rank, sizes[1]), np.float32)
        for layer, module in enumerate(modules):
            if (names := self._modules.get(module)) is None:
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
            ratio = self._scale(module, rank) / lora.scale
            a[layer, :, :rank] = down.T
            b[layer, :rank] = up.T if ratio == 1 else up.T * np.float32(ratio)
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


def _nested(path: tuple[str, ...], leaf: Any) -> dict[str, Any]:
    return {path[0]: leaf if len(path) == 1 else _nested(path[1:], leaf)}
