"""A model in memory: its definition (static, hashable), its parameters, and the rest of its directory."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

import rlhf_core.models.peft as peft
import rlhf_core.models.weights as weights
from rlhf_core.contracts.models import Head
from rlhf_core.errors import InputError, read_json_object, warn
from rlhf_core.mesh import replicated_sharding, row_multiple, row_sharding, with_shardings
from rlhf_core.models.decoder import Decoder
from rlhf_core.models.definition import Definition, complete
from rlhf_core.models.hf_config import shown, text_config, with_text_config
from rlhf_core.models.lora import Lora, layers_without_adapters, merge, module_paths, resolve, untrained
from rlhf_core.models.params import Path as ParameterPath
from rlhf_core.models.params import changed, join, paths, split
from rlhf_core.tokenizer import TOKENIZER_FILES, load_tokenizer, special_ids, template_hash, tokenizer_hash
from rlhf_core.tokenizer.encoding import stop_ids_in

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from rlhf_core.contracts import AttentionOver
    from rlhf_core.models.quantized import Quantization


TEXT_CLASSIFIERS = ("gemma3_text", "qwen3_5_text")
"""Families whose class for rewards is named after the text model, since one of the whole has the shorter name."""


def config_for(hf_config: Mapping[str, Any], head: Head, tokenizer: Any | None) -> dict[str, Any]:
    """Make the config.json for `head`: for "score", `…ForSequenceClassification` with one label and a `pad_token_id`.

    transformers reads the score at the rightmost token whose id is not the config's `pad_token_id`.
    """
    config = dict(hf_config)
    whole = isinstance(config.get("text_config"), Mapping)  # with a vision tower, say
    lm = "ForConditionalGeneration" if whole else "ForCausalLM"
    text = "Text" if config.get("model_type") in TEXT_CLASSIFIERS else ""
    classes = lm, f"{text}ForSequenceClassification"
    old, new = classes if head == "score" else classes[::-1]
    config["architectures"] = [name.replace(old, new) for name in config.get("architectures") or []]
    if head == "lm":
        return {k: v for k, v in config.items() if k not in ("id2label", "label2id", "num_labels")}
    config.pop("num_labels", None)
    config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    pad = getattr(tokenizer, "pad_token_id", None)
    return with_text_config(
        config, {"pad_token_id": text_config(config).get("pad_token_id") if pad is None else pad}
    )


def padding_apart(
    hf_config: Mapping[str, Any], tokenizer: Any | None, stop_ids: Sequence[int], vocab_size: int
) -> tuple[dict[str, Any], Any | None]:
    """Give a reward model's config and tokenizer a padding token that ends no sequence; return both.

    Without a tokenizer the first token of sequences pads, where the config names none. Warns where no token can pad.
    """
    config = text_config(hf_config)
    named = config.get("eos_token_id")
    ends = {*stop_ids, *(named if isinstance(named, list) else [named])}
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {i: token.content for i, token in added.items() if token.special and i < vocab_size}
    own, first = config.get("pad_token_id"), config.get("bos_token_id")
    if tokenizer is None:
        pad = first if own is None else own
        pad = None if pad in ends else pad
    elif (pad := tokenizer.pad_token_id) is None or pad in ends:
        unknown = getattr(tokenizer, "unk_token_id", None)
        free = [i for i in special if i not in ends]
        pad = min(
            free, key=lambda i: (i != own, "pad" not in special[i].lower(), i == unknown, i), default=None
        )
        if pad is not None:
            tokenizer = copy.deepcopy(tokenizer)
            tokenizer.pad_token = special[pad]
    if pad is None and own is not None:
        warn(
            f"the tokenizer's pad token ({own}) also ends sequences, and it has no other that could pad. config.json "
            "names none, so transformers scores one sequence at a time: add a pad_token to tokenizer_config.json "
            "before training, if you need batches there"
        )
    return with_text_config(hf_config, {"pad_token_id": pad}), tokenizer


def require_architectures(config: Mapping[str, Any], where: str) -> None:
    """Raise InputError where `architectures`, which determines the head, is not a list of names."""
    named = config.get("architectures")
    if named is not None and (not isinstance(named, list) or any(not isinstance(n, str) for n in named)):
        raise InputError(f"{where}: architectures must be a list of names; it is {shown(named)}")


GENERATION = "generation_config.json"


def stop_ids_of(directory: Path) -> list[int]:
    """Read the stop ids from the directory's generation_config.json."""
    file = directory / GENERATION
    return stop_ids_in(file) if file.is_file() else []


def save_stop_ids(stop_ids: Sequence[int], config_ids: Any, directory: Path) -> None:
    """Write all stop ids into generation_config.json, unless the files name them already.

    config_ids: `eos_token_id` of config.json, which others read only where there is no generation_config.json.
    """
    file = directory / GENERATION
    rest = read_json_object(file) if file.is_file() else {}
    config_ids = config_ids if isinstance(config_ids, list) else [config_ids]
    if set(stop_ids) <= set(stop_ids_of(directory) if file.is_file() else config_ids):
        return
    text = json.dumps({**rest, "eos_token_id": list(stop_ids)}, indent=2)
    file.write_text(text + "\n", encoding="utf-8")


PROCESSOR_FILES = ["*processor_config.json", "tekken.json", "params.json"]
"""Files of checkpoints that hold more than a text model, which are copied as they are."""


@dataclass(frozen=True, eq=False)
class Model:
    """A definition with parameters on a mesh.

    tokenizer: from its directory, if any. hf_config: its config.json. source: the directory that it came from.
    stored_dtype: "float32", "bfloat16" or "float16", the dtype of the files that `save` writes.
    adapter: the adapter_config.json of a model with adapters. kept: what `save` has to know of the source's files.
    """

    definition: Definition
    params: dict[str, Any]
    tokenizer: Any | None
    hf_config: Mapping[str, Any]
    source: Path | None
    mesh: Mesh
    stored_dtype: str = "float32"
    adapter: Mapping[str, Any] | None = None
    kept: weights.Kept | None = None

    def __post_init__(self) -> None:
        if self.adapter is not None:  # however the model got its head
            object.__setattr__(self, "adapter", peft.for_head(self.adapter, self.definition.head))

    def logits(self, input_ids: Any, attention_mask: Any) -> jax.Array:
        """Compute next-token logits, float32 [B, T, V], meaningless where the mask is 0.

        input_ids, attention_mask: integers [B, T], padding on either side; positions count attended tokens.
        """
        if self.definition.head != "lm":
            raise InputError("logits: this model has a reward head; load it with head='lm'")
        logits: jax.Array = _logits(self.definition, self.params, *self._put(input_ids, attention_mask))
        return logits

    def scores(self, input_ids: Any, attention_mask: Any) -> jax.Array:
        """Compute rewards, float32 [B], at each row's last attended token. Arguments as in `logits`."""
        if self.definition.head != "score":
            raise InputError(
                "scores: this model has no reward head; load it with head='score' or use with_head"
            )
        scores: jax.Array = _scores(self.definition, self.params, *self._put(input_ids, attention_mask))
        return scores

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Raise InputError: a model computes either logits or scores."""
        method = "logits" if self.definition.head == "lm" else "scores"
        raise InputError(
            f"a model is not called: model.{method}(input_ids, attention_mask) computes its {method}"
        )

    def _put(self, *arrays: Any) -> list[jax.Array]:
        """Shard rows over the mesh where their number allows it; else replicate them."""
        even = np.shape(arrays[0])[0] % row_multiple(self.mesh) == 0
        sharding = row_sharding(self.mesh) if even else replicated_sharding(self.mesh)
        return [jax.device_put(jnp.asarray(array, jnp.int32), sharding) for array in arrays]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Token ids that end a completion: the tokenizer's, and those of the source's generation_config.json."""
        ids = [] if self.tokenizer is None else list(special_ids(self.tokenizer).eos)
        ids += [] if self.source is None else stop_ids_of(self.source)
        return tuple(dict.fromkeys(ids))

    @property
    def quantized(self) -> Quantization | None:
        """How the matrices of its layers are held, "nf4" or "int8"; None: in float32."""
        return getattr(self.definition, "quantized", None)

    @property
    def max_positions(self) -> Any:
        """The `max_position_embeddings` of its config.json; None where there is none."""
        return text_config(self.hf_config).get("max_position_embeddings")

    @property
    def computes_in(self) -> str:
        """The dtype of the computation, "float32" or "bfloat16"."""
        tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        params = self.definition.abstract_params()
        return str(jax.eval_shape(self.definition.hidden, params, tokens, tokens, tokens).dtype)

    def as_stored(self, params: Any) -> Any:
        """Round parameters as `save` does, to `stored_dtype`, to evaluate the model that will be saved.

        A model with adapters is returned unchanged: adapters are saved as float32, and the base model is not saved.
        """
        if self.adapter is not None:
            return params
        return rounded(params, self.stored_dtype, {} if self.kept is None else self.kept.dtypes)

    def with_params(self, params: dict[str, Any]) -> Model:
        """Return the model with other parameters, such as a train state's."""
        return dataclasses.replace(self, params=params)

    def with_head(self, head: Head, seed: int = 0) -> Model:
        """Return this model's trunk with `head`, drawn from `seed` where the model lacks it."""
        if head == self.definition.head:
            return self
        definition = dataclasses.replace(self.definition, head=head)
        if isinstance(jax.tree.leaves(self.params)[0], jax.ShapeDtypeStruct):
            params = with_shardings(definition.abstract_params(), definition.shardings(self.mesh))
            return dataclasses.replace(self, definition=definition, params=params)
        model = dataclasses.replace(
            self,
            definition=definition,
            params=complete(definition, self.params, self.mesh, seed),
            hf_config=config_for(self.hf_config, head, self.tokenizer),
        )
        return with_padding_apart(model)

    def computing(
        self, *, dtype: str | None = None, remat: str = "auto", attention: AttentionOver | None = None
    ) -> Model:
        """Return the model with another dtype, remat or attention, see `Decoder`; None and "auto" keep them.

        Raises InputError for an option that the family does not take.
        """
        changed = self.definition.computing(dtype=dtype, remat=remat, attention=attention)
        return self if changed is self.definition else dataclasses.replace(self, definition=changed)

    def with_lora(
        self,
        *,
        rank: int = 8,
        alpha: float = 16.0,
        dropout: float = 0.0,
        use_rslora: bool = False,
        targets: str | Sequence[str] = "all-linear",
        seed: int = 0,
        base: str | None = None,
    ) -> Model:
        """Return the model with fresh adapters, without effect until they are trained; see `Lora`.

        targets: "all-linear", or names and regular expressions of linear layers, see `resolve`. base: the name of this
        model in the adapter's configuration, which has the revision of an hf:// name; default: the directory that it
        came from. Raises InputError for a target that does not exist, and for a model that has adapters already. Warns
        of alternatives of a target that name no layer.
        """
        if self.definition.lora is not None:
            raise InputError("lora: the model has adapters already; merge them first")
        chosen = resolve(targets, module_paths(self.definition))
        for line in chosen.absent if jax.process_index() == 0 else ():
            warn(f"lora.targets: {line}")
        lora = Lora(rank, float(alpha), dropout, use_rslora, chosen.modules, chosen.layers)
        definition = self.definition.with_lora(lora)
        source = base or self.source
        named = None if source is None else peft.named(source)
        params = changed(
            complete(definition, self.params, self.mesh, seed),
            layers_without_adapters(definition),
            lambda leaf, layers: jax.device_put(leaf.at[jnp.asarray(layers)].set(0.0), leaf.sharding),
        )
        return dataclasses.replace(
            self,
            definition=definition,
            params=params,
            adapter=peft.config_for(lora, definition.module_names(), base=named, head=definition.head),
        )

    def merged(self) -> Model:
        """Return the model without adapters, after adding them to its weights, which are float32 then."""
        lora = self.definition.lora
        if lora is None and self.quantized is None:
            return self
        scale = 0.0 if lora is None else lora.scale
        definition = self.definition.with_lora(None).quantized_as(None)
        merging = jax.jit(
            functools.partial(merge, scale=scale), out_shardings=definition.shardings(self.mesh)
        )
        return dataclasses.replace(self, definition=definition, params=merging(self.params), adapter=None)

    def untied(self) -> Model:
        """Return the model that `save` writes with an output head of its own, a copy of its embeddings.

        An engine that keeps its head apart can then be given both. Other models are returned unchanged.
        """
        definition = self.definition
        if not isinstance(definition, Decoder) or not definition.config.tied or definition.head != "lm":
            return self
        names = {"tie_word_embeddings", *({"tie_embedding"} & set(text_config(self.hf_config)))}
        return dataclasses.replace(
            self,
            hf_config=with_text_config(self.hf_config, dict.fromkeys(names, False)),
            kept=weights.with_stored_head(definition, self.kept),
        )

    def storing(self, dtype: str) -> Model:
        """Return the model that `save` writes in this dtype, as `stored_dtype`, which its config.json then names."""
        named = {**self.hf_config, **text_config(self.hf_config)}
        names = [name for name in ("dtype", "torch_dtype") if name in named] or ["torch_dtype"]
        return dataclasses.replace(
            self,
            stored_dtype=dtype,
            hf_config=with_text_config(self.hf_config, dict.fromkeys(names, dtype)),
            kept=None if self.kept is None else dataclasses.replace(self.kept, dtypes={}),
        )

    def save(self, path: str | Path, *, tokenizer: Any | None = None) -> None:
        """Write a Hugging Face directory: config.json, safetensors in the source's dtype, tokenizer files.

        For a model with adapters, only these and the reward head are written, as PEFT does; call `merged()` first to
        save the whole. tokenizer: saved instead of the model's own. With several processes, all must call; the first
        writes.
        """
        require_own_parameters(self.definition, self.params)
        directory = Path(path)
        main = jax.process_index() == 0
        if main:
            directory.mkdir(parents=True, exist_ok=True)
        if self.adapter is not None:
            self._save_adapter(directory)
        elif isinstance(self.definition, Decoder):
            weights.save(self.definition, self.params, directory, self.stored_dtype, self.kept)
        else:
            self.definition.save(self.params, directory, self.stored_dtype)
        if not main:
            return
        if self.adapter is None:
            text = json.dumps(dict(self.hf_config), indent=2, ensure_ascii=False)
            (directory / "config.json").write_text(text + "\n", encoding="utf-8")
        copied = [GENERATION]
        if self.adapter is None and self.kept is not None and self.kept.carried:
            copied += PROCESSOR_FILES
        if self.source is not None:
            _copy_files(self.source, directory, copied)
        tokenizer = self.tokenizer if tokenizer is None else tokenizer
        if tokenizer is not None:
            self._save_tokenizer(tokenizer, directory)

    def _save_tokenizer(self, tokenizer: Any, directory: Path) -> None:
        """Save a tokenizer and its stop ids; that of the model's source as its files are there."""
        if self.source is not None and _is_of(tokenizer, self.source):
            # Unchanged, rather than as transformers would write them.
            _copy_files(self.source, directory, TOKENIZER_FILES)
        else:
            tokenizer.save_pretrained(str(directory))
        stop_ids = dataclasses.replace(self, tokenizer=tokenizer).stop_ids
        save_stop_ids(stop_ids, text_config(self.hf_config).get("eos_token_id"), directory)

    def _save_adapter(self, directory: Path) -> None:
        trained = split(self.params, untrained(self.params))[0]
        gather = jax.jit(lambda x: x, out_shardings=replicated_sharding(self.mesh))
        values = jax.tree.map(np.asarray, gather(trained))
        if jax.process_index() == 0:
            assert self.adapter is not None
            assert self.definition.lora is not None
            peft.save(directory, self.adapter, values, self.definition.lora, self.definition.module_names())


def with_padding_apart(model: Model) -> Model:
    """Return a reward model whose padding token ends no sequence, in config.json and tokenizer; others unchanged.

    transformers reads a score at the last token that is not `pad_token_id`.
    """
    if model.definition.head != "score":
        return model
    size = model.definition.vocab_size
    hf_config, tokenizer = padding_apart(model.hf_config, model.tokenizer, model.stop_ids, size)
    return dataclasses.replace(model, hf_config=hf_config, tokenizer=tokenizer)


def _is_of(tokenizer: Any, directory: Path) -> bool:
    """Whether the tokenizer came from the directory and is unchanged."""
    if getattr(tokenizer, "name_or_path", None) != str(directory):
        return False
    original = load_tokenizer(directory)
    return all(of(original) == of(tokenizer) for of in (tokenizer_hash, template_hash))


def rounded(params: Any, dtype: str, others: Mapping[ParameterPath, str] | None = None) -> Any:
    """Round float32 parameters to `dtype` and back, keeping their shardings; float32 leaves them as they are.

    others: {path: dtype} of the parameters that have another one.
    """
    for other in set((others or {}).values()):
        named = frozenset(path for path, each in (others or {}).items() if each == other)
        rest, some = split(params, named)
        remaining = {path: each for path, each in (others or {}).items() if each != other}
        return join(rounded(rest, dtype, remaining), rounded(some, other)) if some else rounded(rest, dtype)
    if dtype == "float32":
        return params
    leaves, tree = jax.tree.flatten(params)
    shardings = tuple(leaf.sharding for leaf in leaves)
    # Two programs: within one, XLA may drop both conversions.
    return _cast(tree, shardings, "float32")(_cast(tree, shardings, dtype)(params))


@functools.cache
def _cast(tree: Any, shardings: tuple[Any, ...], dtype: str) -> Any:
    def cast(params: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, params)

    return jax.jit(cast, out_shardings=tree.unflatten(shardings))


def require_own_parameters(definition: Definition, params: Any) -> None:
    """Raise InputError where parameters are missing; warn about those that the model's files have no place for."""
    expected, present = ({path for path, _ in paths(p)} for p in (definition.abstract_params(), params))
    missing = sorted(expected - present)
    if missing:
        raise InputError(
            f"save: these are not the model's parameters: '{'.'.join(missing[0])}' is missing; save one of several "
            "models with its own, such as policy.with_params(state.params['policy'])"
        )
    extra = sorted(present - expected)
    if extra:
        listed = ", ".join(".".join(path) for path in extra[:5])
        warn(f"save: the model's files have no place for {listed}")


_logits = functools.partial(jax.jit, static_argnums=0)(Definition.padded_logits)
_scores = functools.partial(jax.jit, static_argnums=0)(Definition.padded_scores)


def _copy_files(source: Path, directory: Path, patterns: Sequence[str]) -> None:
    """Copy the files of one directory that match to another."""
    if source.resolve() == directory.resolve():
        return
    for file in (found for pattern in patterns for found in source.glob(pattern)):
        target = directory / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
