"""Load models from directories and from the hub, and make fresh ones from a table of sizes."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax

import rlhf_core.models.peft as peft
import rlhf_core.models.weights as weights
from rlhf_core import artifacts, hub
from rlhf_core.contracts import MODEL, ModelFamily
from rlhf_core.contracts.models import Head
from rlhf_core.errors import InputError, read_json_object, reading, suggest, suggest_model, warn
from rlhf_core.mesh import make_mesh
from rlhf_core.models.config import Remat
from rlhf_core.models.decoder import Decoder
from rlhf_core.models.definition import Definition, complete
from rlhf_core.models.families import Architecture
from rlhf_core.models.hf_config import COMMON, EXPERT_COUNTS, DecoderFamily, text_config
from rlhf_core.models.model import (
    PROCESSOR_FILES,
    Model,
    config_for,
    require_architectures,
    with_padding_apart,
)
from rlhf_core.models.params import paths
from rlhf_core.plugins import installed_registry
from rlhf_core.plugins.registry import DISTRIBUTED
from rlhf_core.tokenizer import SMALL_FILES

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from rlhf_core.models.quantized import Quantization
    from rlhf_core.plugins.registry import Registry

NO_REWARD_HEAD = "is a language model, without a reward head: rlhf train reward makes a reward model of it"


def _unknown_argument(name: str) -> str:
    """Say that `load_model` has no such argument, and what it has for the same purpose."""
    hint = 'head="score" makes a reward model' if name == "num_labels" else f"it takes {_ARGUMENTS}"
    return f"load_model: {name}: unknown argument; {hint}"


_ARGUMENTS = "head, adapter, mesh, seed, registry, dtype, fresh_head, verify, revision and quantized"


def load_model(
    path: str | Path,
    head: Head = "lm",
    *,
    adapter: str | Path | None = None,
    mesh: Mesh | None = None,
    seed: int = 0,
    registry: Registry | None = None,
    dtype: str | None = None,
    fresh_head: bool = True,
    verify: bool = True,
    revision: str | None = None,
    quantized: Quantization | Literal["none"] | None = None,
    **unknown: Any,
) -> Model:
    """Load a model from a Hugging Face directory, a hub name, or a PEFT adapter, which names its base model.

    adapter: a PEFT directory with an adapter for the model at `path`.
    head: "lm", or "score" for a reward model: a `…ForSequenceClassification` with one label, or a language model,
        whose head is then drawn from `seed`, with a warning, or raises an error where not fresh_head.
    mesh: the devices for the parameters; default: one device.
    registry: holds the model families; default: the registry of all installed plugins.
    revision: branch, tag or commit of a model on the hub.
    dtype: of the computation, "float32" or "bfloat16"; default: float32 on CPU, bfloat16 on accelerators.
    verify: compare every file of an artifact with the hash in its manifest. Where the mesh spans several processes,
        each hashes some of the files, and all must make this call.
    quantized: "nf4" or "int8": hold the matrices of the layers so, see `quantized.layout`; "none": in float32; default:
        as adapters say that they were trained.
    Parameters are float32, whatever their dtype in the files. InputError names the file, field or tensor at fault.
    """
    if unknown:
        raise InputError(*(_unknown_argument(name) for name in unknown))
    directory, adapter_directory, base = model_directories(path, adapter, revision)
    if mesh is None:
        mesh = make_mesh(devices=jax.devices()[:1])
    if verify:
        _require_unchanged(directory, adapter_directory, mesh)
    definition, hf_config = define(_read_config(directory), head, directory, registry, dtype=dtype)
    quantized = _how_held(quantized, adapter_directory, hf_config)
    definition = definition.quantized_as(quantized)
    hf_config = _without_quantization(hf_config, directory, quantized)
    adapters = None if adapter_directory is None else peft.StoredAdapter(adapter_directory)
    params = definition.load(directory, definition.shardings(mesh))
    kept = weights.kept(definition, directory) if isinstance(definition, Decoder) else None
    tokenizer = _tokenizer(adapter_directory) or _tokenizer(directory)
    fresh = head == "score" and any(name not in params for name in definition.abstract_params())
    drawn = fresh and (adapters is None or adapters.score is None)
    if drawn:
        if not fresh_head:
            raise InputError(f"{path} {NO_REWARD_HEAD}")
        warn(f"{path}: a language model: its reward head is new, drawn from seed {seed}")
    if fresh:
        params = complete(definition, params, mesh, seed)
    model = Model(
        definition=definition,
        params=params,
        tokenizer=tokenizer,
        hf_config=config_for(hf_config, head, tokenizer) if fresh else hf_config,
        source=directory,
        mesh=mesh,
        stored_dtype=_stored_dtype(directory, hf_config, kept),
        kept=kept,
    )
    # The contract of a stored head has the hash of its tokenizer, which must not change.
    if drawn:
        model = with_padding_apart(model)
    return model if adapters is None else adapters.on(model, base)


def _how_held(
    asked: Quantization | Literal["none"] | None, adapter: Path | None, hf_config: Mapping[str, Any]
) -> Quantization | None:
    """Return how matrices are held: as asked, or as the adapters were trained."""
    if asked is None and adapter is not None:
        asked = artifacts.quantized_base(adapter)
    return held_as(None if asked == "none" else asked, hf_config)


def _require_unchanged(directory: Path, adapter: Path | None, mesh: Mesh) -> None:
    """Raise InputError for files of artifacts that are not as they were saved, and for adapters of another base."""
    together = len({device.process_index for device in mesh.devices.flat}) > 1
    for each in (directory, adapter):
        if each is not None and (each / artifacts.MANIFEST).is_file():
            artifacts.open_artifact(each, together=together)
    if adapter is not None:
        artifacts.require_base(adapter, directory)


def _without_quantization(
    hf_config: Mapping[str, Any], directory: Path, quantized: Quantization | None
) -> Mapping[str, Any]:
    """Return the config of the model in float32, or as `quantized` holds it, of which config.json says nothing."""
    if "quantization_config" not in text_config(hf_config):
        return hf_config
    if quantized is None:
        warn(
            f"{directory}: quantized weights are converted to float32; adapters can be trained with "
            "lora.base = 'nf4' or 'int8' instead"
        )
    return {name: value for name, value in hf_config.items() if name != "quantization_config"}


def held_as(kind: Quantization | None, hf_config: Mapping[str, Any]) -> Quantization | None:
    """Return how a model is held for which `kind` is asked: as in its files, if that is nf4 with plain scales."""
    stored = text_config(hf_config).get("quantization_config") or {}
    if kind == "nf4" and stored.get("load_in_4bit") and not stored.get("bnb_4bit_use_double_quant"):
        return "nf4_plain"
    return kind


def model_directories(
    path: str | Path, adapter: str | Path | None, revision: str | None = None
) -> tuple[Path, Path | None, peft.Base]:
    """Find the directories of the model and of its adapter, if any, and the adapter's name for the model."""
    if revision is not None and Path(path).expanduser().is_dir():
        raise InputError(
            f"{path} is a directory: revision {revision!r} is for names of the hub; leave it out"
        )
    directory = local_directory(path, revision)
    if adapter is not None:
        return directory, local_directory(adapter), peft.named(path, revision)
    if (directory / peft.CONFIG).is_file() and not (directory / "config.json").is_file():
        base = peft.base_of(directory)
        try:
            return local_directory(base.named, base.revision), directory, base
        except InputError as error:
            raise InputError(
                f"{directory / peft.CONFIG}: its base model, base_model_name_or_path, is not there: {error} Where the "
                "model has moved, set the field to its directory, or give it as --base"
            ) from error
    return directory, None, peft.named(path, revision)


DESCRIBING = (*SMALL_FILES, "rlhf_artifact.json", peft.CONFIG, *PROCESSOR_FILES)
"""What is downloaded of a model's repository to describe it; `WHOLE` to load it."""
WHOLE = (*DESCRIBING, "*.safetensors", "*.safetensors.index.json")


def local_directory(path: str | Path, revision: str | None = None) -> Path:
    """Find the directory of a model; download it first where `path` is a hub name.

    Raises InputError where there is neither.
    """
    if hub.is_hub_name(path):
        if revision is not None:
            raise InputError(f"{path}: its revision is a part of the name: leave {revision!r} out")
        directory = hub.fetch(str(path), WHOLE)
    else:
        directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    if directory.exists():
        raise InputError(f"{path} is a file; give the directory that holds config.json and the weights")
    named = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(path)) is not None
    if not named or directory.parent.is_dir():
        names = sorted(p.name for p in directory.parent.glob("*/")) if directory.parent.is_dir() else []
        raise InputError(
            f"{path}: no such directory; give a directory in Hugging Face layout, or a hub name OWNER/NAME."
            f"{suggest(directory.name, names)}"
        )
    try:
        return hub.fetch(str(hub.HubName(str(path), "model", revision, None)), WHOLE)
    except InputError as error:
        raise InputError(f"{path}: no such directory, and {error}") from None


def described(name: str) -> Path:
    """Find the directory that describes a model with an hf:// name: its files without the weights."""
    return hub.fetch(name, DESCRIBING)


def stored_head(directory: Path) -> Head | None:
    """Read which head the model or adapter in a local directory has; None where no file says so."""
    if (directory / peft.CONFIG).is_file() and not (directory / "config.json").is_file():
        classifies = peft.read_config(directory).get("task_type") == "SEQ_CLS"
        return "score" if classifies or peft.StoredAdapter(directory).score is not None else "lm"
    if not (directory / "config.json").is_file():
        return None
    names = _read_config(directory).get("architectures") or []
    if not names:
        return None
    return "score" if any(str(name).endswith("ForSequenceClassification") for name in names) else "lm"


def _tokenizer(directory: Path | None) -> Any | None:
    names = ("tokenizer.json", "tokenizer_config.json")
    if directory is None or not any((directory / name).is_file() for name in names):
        return None
    from rlhf_core.tokenizer import load_tokenizer

    return load_tokenizer(directory)


def check_model(
    path: str | Path, head: Head = "lm", *, registry: Registry | None = None, needs_weights: bool = True
) -> None:
    """Raise InputError where `load_model` would, from config.json and the headers of the weights.

    Weights are checked for core's families only. needs_weights: whether it is wrong that there are none.
    """
    directory, adapter_directory, _ = model_directories(path, None)
    definition, _ = define(_read_config(directory), head, directory, registry)
    if adapter_directory is not None:
        peft.StoredAdapter(adapter_directory)
    absent = (not needs_weights or hub.in_cache(directory)) and not any(directory.glob("*.safetensors"))
    if isinstance(definition, Decoder) and not absent:
        weights.check(definition, directory)


def define(
    hf_config: Mapping[str, Any],
    head: Head,
    directory: Path,
    registry: Registry | None = None,
    *,
    dtype: str | None = None,
    remat: Remat = "auto",
) -> tuple[Definition, Mapping[str, Any]]:
    """Define the model that a directory's config.json describes, and return it with its config.json.

    Of a checkpoint that holds more, such as a vision tower, it is the text model, as `text_config` describes it.
    dtype, remat: as in `Definition.computing`.
    """
    file = str(directory / "config.json")
    described = hf_config
    contained = find_text_family(hf_config, registry)
    if contained is not None:
        described = {**text_config(hf_config), "model_type": contained}
        described.pop("vision_config", None)
        file = f"{file}: text_config"
    family = find_family(described.get("model_type"), registry, where=file)
    if contained is not None and isinstance(family, DecoderFamily):
        described = {**family.architectures[contained].left_out, **described}
    definition = describe(family, described, head, file, dtype=dtype, remat=remat)
    if isinstance(definition, Decoder):
        definition = weights.placed(definition, directory, contained=contained is not None)
    return untied(definition, hf_config, directory)


SAME_TEXT = {"qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3"}
"""The families that compute what the text models of these do where there are no images."""


def find_text_family(hf_config: Mapping[str, Any], registry: Registry | None = None) -> str | None:
    """Find the `model_type` of the text model of a config.json that describes more; None where it does not.

    A `text_config` may have the model_type of the whole, as in `"qwen3_5"`, without its ending `_text`, or none. Older
    files of Qwen2-VL have its fields among those of the whole.
    """
    inner, outer = hf_config.get("text_config"), hf_config.get("model_type")
    known = known_types(registry)
    if outer in known or (not isinstance(inner, Mapping) and "vision_config" not in hf_config):
        return None
    named = (inner or {}).get("model_type") or outer
    same = SAME_TEXT.get(str(named).removesuffix("_text"))
    if same:
        return same
    return next((name for name in (named, f"{named}_text", f"{outer}_text") if name in known), str(named))


def untied(
    definition: Definition, hf_config: Mapping[str, Any], directory: Path
) -> tuple[Definition, Mapping[str, Any]]:
    """Untie the head of a model whose files hold another one than its config.json says, with a warning."""
    if not isinstance(definition, Decoder) or not weights.has_other_head(definition, directory):
        return definition, hf_config
    if definition.head == "lm":
        warn(
            f"{directory}: {weights.HEAD} differs from the embeddings, although config.json has tie_word_embeddings "
            "true: the model is loaded untied, as transformers 5 does, and saved with tie_word_embeddings false"
        )
    config = dataclasses.replace(definition.config, tied=False)
    return dataclasses.replace(definition, config=config), {**hf_config, "tie_word_embeddings": False}


def describe(
    family: ModelFamily,
    hf_config: Mapping[str, Any],
    head: Head,
    where: str,
    *,
    dtype: str | None = None,
    remat: Remat = "auto",
) -> Definition:
    """Define the model that a config.json describes; errors of the family say `where` the config is from.

    dtype, remat: as in `Definition.computing`.
    """
    try:
        with reading(where):
            return family.define(hf_config, head).computing(dtype=dtype, remat=remat)
    except InputError as error:
        raise InputError(*(line.replace("config.json", where, 1) for line in error.problems)) from error


def fresh_model(
    table: Mapping[str, Any],
    head: Head = "lm",
    *,
    tokenizer: Any | None = None,
    mesh: Mesh | None = None,
    seed: int = 0,
    registry: Registry | None = None,
) -> Model:
    """Make a model with random weights from Hugging Face's config fields, `model_type` among them.

    `vocab_size` and the bos, eos and pad ids come from `tokenizer` where the table has none. Other defaults are
    Hugging Face's, except that head_dim is hidden_size / num_attention_heads, and gemma's query_pre_attn_scalar is
    head_dim. A seed gives the same weights on every mesh. Raises InputError with every unknown or impossible field.
    """
    hf_config = complete_table(table, tokenizer, registry)
    family = find_family(hf_config.get("model_type"), registry, where="model")
    require_architectures(hf_config, "model")
    hf_config = config_for(hf_config, head, tokenizer) if head == "score" else hf_config
    definition = describe(family, hf_config, head, "model")
    mesh = make_mesh(devices=jax.devices()[:1]) if mesh is None else mesh
    require_memory(definition, mesh)
    params = complete(definition, {}, mesh, seed)
    return with_padding_apart(Model(definition, params, tokenizer, hf_config, None, mesh))


def require_memory(definition: Definition, mesh: Mesh) -> None:
    """Raise InputError, before anything is allocated, where the parameters alone exceed the mesh's memory."""
    count = sum(math.prod(leaf.shape) for _, leaf in paths(definition.abstract_params()))
    memory = _memory_bytes(mesh)
    if memory is not None and 4 * count > memory:
        raise InputError(
            f"model: its sizes give {count:,} parameters, {4 * count / 1e9:,.1f} GB in float32, and there are "
            f"{memory / 1e9:,.1f} GB of memory: make it smaller, or use more devices"
        )


def _memory_bytes(mesh: Mesh) -> int | None:
    """Read the bytes of the mesh's devices, or of the machines where they are CPUs; None where unknown."""
    device = next(device for device in mesh.devices.flat if device.process_index == jax.process_index())
    if device.platform == "cpu":
        if "SC_PHYS_PAGES" not in os.sysconf_names:
            return None
        return jax.process_count() * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return None if limit is None else int(limit) * mesh.size


def complete_table(
    table: Mapping[str, Any], tokenizer: Any | None, registry: Registry | None
) -> dict[str, Any]:
    """Complete a table of sizes to a config.json, as `fresh_model` describes."""
    sizes = {name: value for name, value in table.items() if name != "tokenizer"}
    family = find_family(sizes.get("model_type"), registry, where="model")
    hf_config = dict(sizes)
    if isinstance(family, DecoderFamily):
        hf_config = _with_defaults(sizes, family.architectures[sizes["model_type"]])
    if tokenizer is not None:
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            hf_config.setdefault(name, getattr(tokenizer, name, None))
        size = hf_config.setdefault("vocab_size", len(tokenizer))
        if isinstance(size, int) and size < len(tokenizer):
            raise InputError(f"model: vocab_size {size} is less than the tokenizer's {len(tokenizer)} tokens")
    return hf_config


def find_family(
    model_type: Any, registry: Registry | None = None, *, where: str = "config.json"
) -> ModelFamily:
    """Find the family that reads `model_type`. Raises InputError where none or several do.

    registry: holds the families; default: the registry of all installed plugins. where: the file or field with it.
    """
    families = _families(registry)
    readers = [name for name, family in families.items() if model_type in family.name]
    if len(readers) == 1:
        return families[readers[0]]
    if readers:
        raise InputError(
            f"{where}: model_type {model_type!r} is read by {' and '.join(readers)}: uninstall or disable one of them"
        )
    known = known_types(registry)
    hint = suggest(str(model_type), known)
    elsewhere = DISTRIBUTED.get((MODEL, str(model_type).removesuffix("_text")))
    if elsewhere is not None:
        hint = f" Install the package that reads it (pip install {elsewhere})"
    raise InputError(f"{where}: model_type {model_type!r} is not supported; known: {', '.join(known)}.{hint}")


def known_types(registry: Registry | None = None) -> list[str]:
    """List every `model_type` that a family reads."""
    return sorted(name for family in _families(registry).values() for name in family.name)


def _families(registry: Registry | None) -> dict[str, ModelFamily]:
    registry = installed_registry() if registry is None else registry
    return {name: registry.get(MODEL, name) for name in registry.names(MODEL)}


def _with_defaults(sizes: Mapping[str, Any], rules: Architecture) -> dict[str, Any]:
    """Complete a config.json, in the format of transformers 4, which 5 reads, too."""
    filled: dict[str, Any] = {
        "architectures": [rules.causal_lm],
        # Of a family's older names, null is no default: transformers takes it for the value.
        **{name: value for name, value in {**COMMON, **rules.defaults}.items() if value is not None},
        "num_key_value_heads": sizes.get("num_attention_heads"),
        "torch_dtype": "float32",
        "attention_dropout": 0.0,
        "use_cache": True,
    }
    filled.setdefault(rules.activation, "silu")
    if "rope_parameters" in sizes:
        filled = {name: value for name, value in filled.items() if not name.startswith("rope_")}
    else:
        filled["rope_scaling"] = None
    head_dim = _usual_head_dim(sizes)
    if head_dim is not None:
        filled["head_dim"] = head_dim
        if "query_pre_attn_scalar" in filled:
            filled["query_pre_attn_scalar"] = sizes.get("head_dim") or head_dim
    filled |= sizes
    # Two names of one number. transformers would read null under either name as the number.
    kept = _numbers(sizes, EXPERT_COUNTS) or _numbers(filled, EXPERT_COUNTS)
    return {name: value for name, value in filled.items() if name not in EXPERT_COUNTS or name in kept}


def _usual_head_dim(sizes: Mapping[str, Any]) -> int | None:
    """Return the hidden size by the number of heads; None where they are not known, or do not divide."""
    hidden, heads = sizes.get("hidden_size"), sizes.get("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads <= 0 or hidden % heads:
        return None
    return hidden // heads


def _numbers(config: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """List the names that a config gives a value."""
    return [name for name in names if config.get(name) is not None]


def _read_config(directory: Path) -> dict[str, Any]:
    file = directory / "config.json"
    if not file.is_file():
        raise InputError(
            f"{directory}: no config.json: not a model directory in Hugging Face layout.{suggest_model(directory)}"
        )
    config = read_json_object(file)
    require_architectures(config, str(file))
    return config


def _stored_dtype(directory: Path, hf_config: Mapping[str, Any], kept: weights.Kept | None) -> str:
    if kept is not None:
        return kept.dtype or "float32"
    if (directory / "model.safetensors").is_file() or (directory / weights.INDEX).is_file():
        readers = weights.open_weights(directory)
        return weights.usual_dtype([reader.dtype(name) for name, reader in readers.items()]) or "float32"
    return str(hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32")
