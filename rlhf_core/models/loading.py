"""Models from directories, from the hub, and from a table of sizes."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from rlhf_core.contracts import MODEL, ModelFamily
from rlhf_core.errors import InputError, near
from rlhf_core.mesh import make_mesh
from rlhf_core.models import decoder, weights
from rlhf_core.models.config import ARCHITECTURES, FIELDS, Head, parse
from rlhf_core.models.model import TOKENIZER_FILES, Definition, Model, complete, config_for

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from rlhf_core.registry import Registry

DECODER = ModelFamily(
    name=tuple(ARCHITECTURES),
    parse=parse,
    abstract=decoder.abstract,
    axes=decoder.axes,
    init=decoder.init,
    hidden=decoder.hidden,
    unembedding=decoder.unembedding,
    score=decoder.score,
    prefill=decoder.prefill,
    repeat=decoder.repeat,
    prepare=decoder.prepare,
    decode=decoder.decode,
    load=weights.load,
    save=weights.save,
)
"""Core's own family: llama, qwen2, qwen3."""


def load_model(
    path: str | Path,
    head: Head = "lm",
    *,
    mesh: Mesh | None = None,
    seed: int = 0,
    registry: Registry | None = None,
    dtype: str | None = None,
) -> Model:
    """A model from a Hugging Face directory or hub name.

    head: "lm", or "score" for a reward model: a `…ForSequenceClassification` with one label, or a language model,
        whose head is then drawn from `seed`, with a warning that says so.
    mesh: where the parameters go; default: one device. registry: of the model families; default: core's own.
    dtype: of the computation, "float32" or "bfloat16"; default: float32 on CPU, bfloat16 on accelerators.
    Parameters are float32 whatever the files hold. InputError names the file, field or tensor at fault.
    """
    directory = _directory(path)
    hf_config = _read_config(directory)
    family = find_family(hf_config.get("model_type"), registry)
    options = {} if dtype is None else {"dtype": dtype}
    try:
        config = family.parse(hf_config, head, **options)
    except InputError as error:
        file = str(directory / "config.json")
        raise InputError(*(line.replace("config.json", file, 1) for line in error.problems)) from None
    mesh = make_mesh(devices=jax.devices()[:1]) if mesh is None else mesh
    definition = Definition(family, config, head)
    params = family.load(config, directory, definition.shardings(mesh))
    tokenizer = None
    if any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        from rlhf_core.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(directory)
    fresh = head == "score" and any(name not in params for name in definition.abstract_params())
    if fresh:
        warnings.warn(
            f"{path}: a language model: its reward head is new, drawn from seed {seed}", stacklevel=2
        )
        params = complete(definition, params, mesh, seed)
    return Model(
        definition=definition,
        params=params,
        tokenizer=tokenizer,
        hf_config=config_for(hf_config, head, tokenizer) if fresh else hf_config,
        source=directory,
        mesh=mesh,
        stored_dtype=_stored_dtype(directory, hf_config),
        compute_dtype=dtype,
    )


def fresh_model(
    table: Mapping[str, Any],
    head: Head = "lm",
    *,
    tokenizer: Any | None = None,
    mesh: Mesh | None = None,
    seed: int = 0,
    registry: Registry | None = None,
) -> Model:
    """A model with random weights from Hugging Face's config names, `model_type` among them.

    `vocab_size` and the bos, eos and pad ids come from `tokenizer` where the table has none. Other defaults are
    Hugging Face's, except that head_dim is hidden_size / num_attention_heads. A seed gives the same weights on every
    mesh. Raises InputError with every unknown or impossible field.
    """
    hf_config = complete_table(table, tokenizer, registry)
    family = find_family(hf_config.get("model_type"), registry)
    hf_config = config_for(hf_config, head, tokenizer) if head == "score" else hf_config
    try:
        config = family.parse(hf_config, head)
    except InputError as error:
        raise InputError(*(line.replace("config.json", "model", 1) for line in error.problems)) from None
    definition = Definition(family, config, head)
    mesh = make_mesh(devices=jax.devices()[:1]) if mesh is None else mesh
    params = complete(definition, {}, mesh, seed)
    return Model(definition, params, tokenizer, hf_config, None, mesh)


def complete_table(
    table: Mapping[str, Any], tokenizer: Any | None, registry: Registry | None
) -> dict[str, Any]:
    """A whole config.json for a table of sizes, as `fresh_model` describes it."""
    given = {name: value for name, value in table.items() if name != "tokenizer"}
    family = find_family(given.get("model_type"), registry)
    if family is DECODER:
        unknown = [
            f"model: unknown field '{name}'.{near(name, FIELDS)}" for name in given if name not in FIELDS
        ]
        if unknown:
            raise InputError(*unknown)
        hf_config = _defaults(given)
    else:
        hf_config = dict(given)
    if tokenizer is not None:
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            hf_config.setdefault(name, getattr(tokenizer, name, None))
        size = hf_config.setdefault("vocab_size", len(tokenizer))
        if isinstance(size, int) and size < len(tokenizer):
            raise InputError(f"model: vocab_size {size} is less than the tokenizer's {len(tokenizer)} tokens")
    return hf_config


def find_family(model_type: Any, registry: Registry | None = None) -> ModelFamily:
    """The family that reads `model_type`, of the registry's or core's own; InputError where none or several do."""
    families = {"decoder": DECODER}
    if registry is not None:
        families = {name: registry.get(MODEL, name) for name in registry.names(MODEL)}
    found = [name for name, family in families.items() if model_type in family.name]
    if len(found) == 1:
        return families[found[0]]
    if found:
        raise InputError(
            f"model_type {model_type!r} is read by {' and '.join(found)}: uninstall or disable one of them"
        )
    known = sorted(name for family in families.values() for name in family.name)
    hint = near(str(model_type), known)
    raise InputError(f"model_type {model_type!r} is not supported; known: {', '.join(known)}.{hint}")


def _defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """A complete config.json, in the spelling of transformers 4, which 5 reads too."""
    rules = ARCHITECTURES[given["model_type"]]
    filled: dict[str, Any] = {
        "architectures": [rules.causal_lm],
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 2048,
        "num_key_value_heads": given.get("num_attention_heads"),
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "attention_dropout": 0.0,
        "use_cache": True,
    }
    if "rope_parameters" not in given:
        filled |= {"rope_theta": 10_000.0, "rope_scaling": None}
    switches = (rules.qkv_bias, rules.o_bias, rules.mlp_bias, rules.windowed)
    filled |= dict.fromkeys((name for name in switches if isinstance(name, str)), False)
    hidden, heads = given.get("hidden_size"), given.get("num_attention_heads")
    if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 and hidden % heads == 0:
        filled["head_dim"] = hidden // heads
    return filled | dict(given)


def _directory(path: str | Path) -> Path:
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    named = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(path)) is not None
    if not named or directory.parent.is_dir():
        beside = sorted(p.name for p in directory.parent.glob("*/")) if directory.parent.is_dir() else []
        raise InputError(
            f"{path}: no such directory; give a directory in Hugging Face layout, or a hub name OWNER/NAME."
            f"{near(directory.name, beside)}"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    patterns = [
        "*.safetensors",
        "*.safetensors.index.json",
        "config.json",
        "generation_config.json",
        *TOKENIZER_FILES,
    ]
    try:
        return Path(snapshot_download(str(path), allow_patterns=patterns))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"{path}: no such directory, and the hub did not give it: {reason}") from None


def _read_config(directory: Path) -> dict[str, Any]:
    file = directory / "config.json"
    if not file.is_file():
        adapter = (directory / "adapter_config.json").is_file()
        hint = "; it is an adapter, which is not a model by itself: give its base model" if adapter else ""
        raise InputError(f"{directory}: no config.json: not a model directory in Hugging Face layout{hint}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise InputError(f"{file}: must hold a JSON object")
    return config


def _stored_dtype(directory: Path, hf_config: Mapping[str, Any]) -> str:
    if (directory / "model.safetensors").is_file() or (directory / weights.INDEX).is_file():
        return weights.stored_dtype(directory) or "float32"
    return str(hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32")
