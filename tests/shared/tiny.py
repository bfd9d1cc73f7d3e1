"""Models, tokenizers and data so small that a test trains on them in seconds; the fixture `tiny` is this module."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf_core import Stage, artifacts, plugins
from rlhf_core.contracts import TRAINER, Artifact
from rlhf_core.mesh import make_mesh
from rlhf_core.models import Model, complete_table, fresh_model
from rlhf_core.stage.execute import execute
from tests.shared.decoder_configs import defined

WORDS = ["<pad>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz", *"ABCDEFGHIJKLMNOPQRS"]
SIZES = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 128,
}


def save_policy(model: Model, run: Path) -> Path:
    """Save a model as the artifact of a stage, and return its directory."""
    told = SimpleNamespace(rlhf_artifact_saved=lambda **_: None)
    stage: Any = SimpleNamespace(dir=run / "policy", name="policy", is_main=True, hook=told)
    return artifacts.save_model(stage, "model", "language_model", model).path


def make_tokenizer() -> Any:
    """A word a token; a sequence ends with </s>."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


def one_device() -> Any:
    return make_mesh(devices=jax.devices()[:1])


@functools.cache
def _made(head: str, seed: int, sizes: str) -> tuple[Model, Any]:
    """The model without parameters, and its parameters on the host: drawing them again costs a compilation."""
    table = {**SIZES, **json.loads(sizes)}
    model = fresh_model(table, head, tokenizer=make_tokenizer(), mesh=one_device(), seed=seed)
    return model.with_params({}), jax.device_get(model.params)


def make_model(head: str = "lm", *, seed: int = 1, scale: float = 1.0, **sizes: Any) -> Model:
    """A fresh model on one device, its weight matrices times `scale`: a fresh model's outputs hardly differ.

    Nothing of it is another model's: parameters are overwritten by updates, tokenizers get tokens added.
    """
    model, params = _made(head, seed, json.dumps(sizes, sort_keys=True))
    shardings = model.definition.shardings(model.mesh)
    placed = jax.tree.map(
        lambda x, s: jax.device_put(x * np.float32(scale) if x.ndim > 1 else x.copy(), s), params, shardings
    )
    return dataclasses.replace(
        model, params=placed, tokenizer=make_tokenizer(), hf_config=copy.deepcopy(model.hf_config)
    )


def drawn(table: dict[str, Any]) -> Model:
    """A model of a table of sizes, its parameters drawn by NumPy: `fresh_model` compiles how it draws them."""
    hf_config, draw = complete_table(table, None, None), np.random.default_rng(0)
    definition = defined(hf_config, "lm")
    params = jax.tree.map(
        lambda x: draw.normal(size=x.shape).astype(np.float32), definition.abstract_params()
    )
    return Model(definition, params, None, hf_config, None, one_device())


def _words(draw: np.random.Generator, low: int, high: int) -> str:
    return " ".join(WORDS[i] for i in draw.integers(3, len(WORDS), draw.integers(low, high + 1)))


def texts(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows prompt + completion."""
    draw = np.random.default_rng(seed)
    return [{"prompt": _words(draw, 2, 5), "completion": " " + _words(draw, 1, 6)} for _ in range(count)]


def pairs(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows prompt + chosen + rejected + margin."""
    draw = np.random.default_rng(seed)
    return [
        {
            "prompt": _words(draw, 1, 6),
            "chosen": " " + _words(draw, 1, 7),
            "rejected": " " + _words(draw, 1, 7),
            "margin": float(draw.integers(0, 3)) / 4,
        }
        for _ in range(count)
    ]


def prompts(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows prompt + answer + number."""
    draw = np.random.default_rng(seed)
    return [{"prompt": _words(draw, 2, 6), "answer": _words(draw, 1, 1), "number": i} for i in range(count)]


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_array_record(path: Path, rows: Iterable[Any]) -> Path:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1")
    for row in rows:
        writer.write(json.dumps(row).encode())
    writer.close()
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(
    trainer: str,
    config: Any,
    directory: Path,
    *,
    listeners: Sequence[object] = (),
    mesh: Any = None,
    **inputs: Any,
) -> Artifact:
    """One trainer as a stage of its own name in `directory`, on one device; its artifact `model`."""
    host = plugins.load(objects=listeners)
    stage = Stage(
        name=trainer,
        dir=directory,
        seed=config.seed or 0,
        mesh=mesh or one_device(),
        is_main=True,
        registry=host.registry,
        hook=host.hook,
        inputs=inputs,
    )
    return execute(host.registry.get(TRAINER, trainer), config, stage, host)["model"]


def leaves(params: Any) -> dict[str, np.ndarray]:
    """{dotted path: array}."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
