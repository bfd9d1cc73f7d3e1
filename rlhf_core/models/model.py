"""A model in memory: its definition (static, hashable), its parameters, and what else its directory held."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_core.contracts import ModelFamily
from rlhf_core.errors import InputError
from rlhf_core.mesh import param_shardings, replicated, row_multiple, row_sharding
from rlhf_core.models.config import Head
from rlhf_core.tokenizer import special_ids

if TYPE_CHECKING:
    from jax.sharding import Mesh

TOKENIZER_FILES = [
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
]


@dataclass(frozen=True)
class Definition:
    """What a model is without its arrays: static under jit. See `ModelFamily` for what its functions do."""

    family: ModelFamily
    config: Any
    head: Head

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    def abstract_params(self) -> dict[str, Any]:
        """Nested dict of jax.ShapeDtypeStruct, float32."""
        return self.family.abstract(self.config)

    def logical_axes(self) -> dict[str, Any]:
        """The same dict with a tuple of logical axis names at every leaf."""
        return self.family.axes(self.config)

    def shardings(self, mesh: Mesh) -> dict[str, Any]:
        """The same dict of NamedSharding."""
        return param_shardings(mesh, self.logical_axes(), self.abstract_params())

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Fresh parameters, float32."""
        return self.family.init(self.config, key)

    def hidden(self, params: Any, tokens: Any, positions: Any, visible_until: Any) -> jax.Array:
        """[rows, time, hidden] after the last norm, in the compute dtype, of int32 [rows, time]."""
        return self.family.hidden(self.config, params, tokens, positions, visible_until)

    def unembedding(self, params: Any) -> tuple[jax.Array, float | None]:
        """(kernel [hidden, vocab], soft cap or None)."""
        return self.family.unembedding(self.config, params)

    def score(self, params: Any, hidden: jax.Array) -> jax.Array:
        """Rewards float32 [...] of hidden states [..., hidden]."""
        return self.family.score(self.config, params, hidden)

    def prefill(
        self, params: Any, tokens: Any, positions: Any, visible_until: Any, cache_length: int
    ) -> tuple[jax.Array, Any]:
        """(hidden states as `hidden`, a cache of `cache_length` slots whose first `time` are filled)."""
        return self.family.prefill(self.config, params, tokens, positions, visible_until, cache_length)

    def repeat(self, cache: Any, times: int) -> Any:
        """The cache with every row `times` times, neighbours together."""
        return self.family.repeat(self.config, cache, times)

    def prepare(self, params: Any) -> Any:
        """The parameters as `decode` reads them fastest."""
        return self.family.prepare(self.config, params)

    def decode(
        self, params: Any, cache: Any, tokens: Any, positions: Any, visible: Any, slot: Any
    ) -> tuple[jax.Array, Any]:
        """One token a row, written at `slot`: (hidden [B, hidden], cache)."""
        return self.family.decode(self.config, params, cache, tokens, positions, visible, slot)


@dataclass(frozen=True, eq=False)
class Model:
    """A definition with parameters on a mesh.

    tokenizer: its directory's, if any. hf_config: what config.json will say. source: the directory it came from.
    stored_dtype: "float32", "bfloat16" or "float16", of the files it is saved as.
    compute_dtype: None for the backend's: float32 on CPU, bfloat16 on accelerators.
    """

    definition: Definition
    params: dict[str, Any]
    tokenizer: Any | None
    hf_config: Mapping[str, Any]
    source: Path | None
    mesh: Mesh
    stored_dtype: str = "float32"
    compute_dtype: str | None = None

    def logits(self, input_ids: Any, attention_mask: Any) -> jax.Array:
        """Next-token logits float32 [B, T, V]; meaningless where the mask is 0.

        input_ids, attention_mask: integers [B, T], padding on either side; positions count attended tokens.
        """
        if self.definition.head != "lm":
            raise InputError("logits: this model has a reward head; load it with head='lm'")
        logits: jax.Array = _logits(self.definition, self.params, *self._put(input_ids, attention_mask))
        return logits

    def scores(self, input_ids: Any, attention_mask: Any) -> jax.Array:
        """Rewards float32 [B], read at each row's last attended token. Arguments as in `logits`."""
        if self.definition.head != "score":
            raise InputError(
                "scores: this model has no reward head; load it with head='score' or use with_head"
            )
        scores: jax.Array = _scores(self.definition, self.params, *self._put(input_ids, attention_mask))
        return scores

    def _put(self, *arrays: Any) -> list[jax.Array]:
        """Spread over the mesh by rows where their number allows it."""
        even = np.shape(arrays[0])[0] % row_multiple(self.mesh) == 0
        sharding = row_sharding(self.mesh) if even else replicated(self.mesh)
        return [jax.device_put(jnp.asarray(array, jnp.int32), sharding) for array in arrays]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Token ids that end a completion: the tokenizer's, and those of the source's generation_config.json."""
        found = [] if self.tokenizer is None else list(special_ids(self.tokenizer).eos)
        path = None if self.source is None else self.source / "generation_config.json"
        if path is not None and path.is_file():
            named = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            found += [named] if isinstance(named, int) else list(named or ())
        return tuple(dict.fromkeys(found))

    def with_params(self, params: dict[str, Any]) -> Model:
        """The same model with other parameters, such as a train state's."""
        return dataclasses.replace(self, params=params)

    def with_head(self, head: Head, seed: int = 0) -> Model:
        """This model's trunk under `head`; a head that the model lacks is drawn from `seed`."""
        if head == self.definition.head:
            return self
        family = self.definition.family
        options = {} if self.compute_dtype is None else {"dtype": self.compute_dtype}
        definition = Definition(family, family.parse(self.hf_config, head, **options), head)
        return dataclasses.replace(
            self,
            definition=definition,
            params=complete(definition, self.params, self.mesh, seed),
            hf_config=config_for(self.hf_config, head, self.tokenizer),
        )

    def save(self, path: str | Path, *, tokenizer: Any | None = None) -> None:
        """Write a Hugging Face directory: config.json, safetensors in the source's dtype, tokenizer files.

        tokenizer: to save instead of the model's own. With several processes all must call; the first writes.
        """
        directory = Path(path)
        main = jax.process_index() == 0
        if main:
            directory.mkdir(parents=True, exist_ok=True)
        self.definition.family.save(self.definition.config, self.params, directory, self.stored_dtype)
        if not main:
            return
        (directory / "config.json").write_text(
            json.dumps(dict(self.hf_config), indent=2, ensure_ascii=False) + "\n"
        )
        tokenizer = self.tokenizer if tokenizer is None else tokenizer
        copied = ["generation_config.json"]
        if tokenizer is not None and getattr(tokenizer, "name_or_path", None) == str(self.source):
            copied += TOKENIZER_FILES  # word for word, rather than what transformers would write
        elif tokenizer is not None:
            tokenizer.save_pretrained(str(directory))
        if self.source is not None and self.source.resolve() != directory.resolve():
            for name in copied:
                if (self.source / name).is_file():
                    shutil.copyfile(self.source / name, directory / name)


def complete(definition: Definition, params: Mapping[str, Any], mesh: Mesh, seed: int) -> dict[str, Any]:
    """`params` for `definition`: without the groups it has no place for; those it lacks are drawn from `seed`."""
    shardings = definition.shardings(mesh)
    missing = {name: sharding for name, sharding in shardings.items() if name not in params}
    kept = {name: value for name, value in params.items() if name in shardings}
    if not missing:
        return kept

    def draw(key: jax.Array) -> dict[str, Any]:
        fresh = definition.init(key)
        return {name: fresh[name] for name in missing}

    drawn: dict[str, Any] = jax.jit(draw, out_shardings=missing)(jax.random.key(seed))
    return kept | drawn


def config_for(hf_config: Mapping[str, Any], head: Head, tokenizer: Any | None) -> dict[str, Any]:
    """config.json for `head`: for "score", `…ForSequenceClassification` with one label and a `pad_token_id`.

    transformers reads the score at the rightmost token that is not padding, by id: the config must name the
    tokenizer's padding token.
    """
    config = dict(hf_config)
    ours, theirs = ("ForCausalLM", "ForSequenceClassification")
    if head == "lm":
        config["architectures"] = [name.replace(theirs, ours) for name in config.get("architectures") or []]
        return {k: v for k, v in config.items() if k not in ("id2label", "label2id", "num_labels")}
    config["architectures"] = [name.replace(ours, theirs) for name in config.get("architectures") or []]
    config.pop("num_labels", None)
    config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    pad = getattr(tokenizer, "pad_token_id", None)
    config["pad_token_id"] = config.get("pad_token_id") if pad is None else pad
    if config["pad_token_id"] is None:
        # A first token never ends a sequence, so transformers still finds the last one.
        config["pad_token_id"] = config.get("bos_token_id")
    ends = config.get("eos_token_id")
    if config["pad_token_id"] in (ends if isinstance(ends, list) else [ends]) and ends is not None:
        warnings.warn(
            f"token {config['pad_token_id']} is both padding and the end of a sequence: transformers, which skips "
            "padding, will read scores one token before the end; give the tokenizer a padding token of its own",
            stacklevel=3,
        )
    return config


def padded_rows(input_ids: jax.Array, attention_mask: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(tokens, positions, visible_until), int32 [B, T], of a padded batch.

    Padding may be on either side; positions count attended tokens from 0; attended keys are seen to the row's end.
    """
    attended = attention_mask != 0
    positions = jnp.maximum(jnp.cumsum(attended, axis=1, dtype=jnp.int32) - 1, 0)
    visible_until = jnp.where(attended, attention_mask.shape[1], 0).astype(jnp.int32)
    return input_ids, positions, visible_until


def padded_scores(
    definition: Definition, params: Any, input_ids: jax.Array, attention_mask: jax.Array
) -> jax.Array:
    """Rewards float32 [B] of a padded batch, read at each row's last attended token."""
    hidden = definition.hidden(params, *padded_rows(input_ids, attention_mask))
    last = attention_mask.shape[1] - 1 - jnp.argmax(attention_mask[:, ::-1] != 0, axis=1)
    return definition.score(params, jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0])


@functools.partial(jax.jit, static_argnums=0)
def _logits(definition: Definition, params: Any, ids: jax.Array, mask: jax.Array) -> jax.Array:
    hidden = definition.hidden(params, *padded_rows(ids, mask))
    kernel, cap = definition.unembedding(params)
    logits = jnp.einsum(
        "btd,dv->btv", hidden, kernel.astype(hidden.dtype), preferred_element_type=jnp.float32
    )
    return logits if cap is None else cap * jnp.tanh(logits / cap)


_scores = functools.partial(jax.jit, static_argnums=0)(padded_scores)
