"""The models of a server, opened: policies with their samplers, and scorers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlhf_http.fields import ALTERNATIVES

from rlhf_core import artifacts
from rlhf_core.contracts import SamplerInputs
from rlhf_core.environments import ConversationEncoder
from rlhf_core.errors import InputError
from rlhf_core.models import Model, load_model, local_directory, stored_head
from rlhf_core.sampling import ConversationSampler, SamplingOptions
from rlhf_core.sampling.stop_strings import token_bytes
from rlhf_core.sampling.turns import STOP_IDS
from rlhf_core.tokenizer import with_template_and_stop_ids
from rlhf_core.tokenizer.encoding import Encoder
from rlhf_core.tokenizer.options import TextOptions
from rlhf_serve.engine import Policy

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from rlhf_core.contracts import Weights
    from rlhf_core.plugins.registry import Registry
    from rlhf_core.scoring import Scorer

DEFAULT_LENGTH = 2048
"""Tokens of a prompt and its completion together, of models that take more or say nothing."""


@dataclass(frozen=True)
class Opening:
    """How models are opened. slots: completions that are sampled together. length: tokens of a prompt and its
    completion; None: what the model takes, at most `DEFAULT_LENGTH`. chat_template: of policies; None: the tokenizer's.
    quantize: as `load_model` takes it.
    """

    slots: int = 32
    length: int | None = None
    registry: Registry | None = None
    mesh: Mesh | None = None
    chat_template: str | None = None
    quantize: Literal["nf4", "int8", "none"] | None = None


@dataclass
class ServedAdapter:
    """An adapter of a policy, under its name."""

    name: str
    path: str
    weights: Weights


@dataclass(eq=False)
class ServedPolicy:
    """A policy under its name. weights and version of requests are those at their beginning."""

    name: str
    path: str
    policy: Policy
    length: int
    encoder: Encoder
    conversations: ConversationEncoder
    adapters: dict[str, ServedAdapter] = field(default_factory=dict)

    @property
    def tokenizer(self) -> Any:
        return self.encoder.tokenizer

    def token_bytes(self, token: int) -> bytes:
        """Return what a token writes, UTF-8; of a special token its name."""
        name = self._special.get(token)
        if name is not None:
            return name.encode()
        if self._bytes is not None:
            return self._bytes[token] if token < len(self._bytes) else b""
        text: str = self.tokenizer.decode([token], clean_up_tokenization_spaces=False)
        return text.encode()

    @cached_property
    def added_bos(self) -> int | None:
        """The BOS that the tokenizer puts in front of a text; None where it puts none."""
        bos = self.encoder.special.bos
        first = self.encoder.tokenize_open([("a", True)])[0][:1]
        return bos if len(first) and first[0] == bos else None

    @cached_property
    def _special(self) -> dict[int, str]:
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return {int(i): token.content for i, token in added.items() if token.special}

    @cached_property
    def _bytes(self) -> list[bytes] | None:
        """None for a tokenizer whose tokens have no text of their own."""
        try:
            return token_bytes(self.tokenizer)
        except InputError:
            return None

    @property
    def vocab_size(self) -> int:
        return self.policy.model.definition.vocab_size

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end a completion unless a request says otherwise."""
        return self.policy.model.stop_ids


@dataclass(eq=False)
class ServedScorer:
    """A reward model under its name."""

    name: str
    path: str
    scorer: Scorer
    layouts: list[Any] = field(default_factory=list)
    """The shapes of batches that were compiled for."""


def open_model(name: str, path: str, opening: Opening) -> ServedPolicy | ServedScorer:
    """Open a model and start to compile its programs.

    Raises InputError for a directory that has none, and for a policy without a tokenizer or that cannot be sampled from
    by slots.
    """
    if stored_head(local_directory(path)) == "score":
        from rlhf_core.scoring import Scorer

        scorer = Scorer.load(path, registry=opening.registry, mesh=opening.mesh, quantized=opening.quantize)
        scorer.reuses_shapes = True
        return ServedScorer(name, path, scorer)
    model = load_policy(path, opening)
    if model.tokenizer is None:
        raise InputError(
            f"{path}: no tokenizer files; add tokenizer.json and tokenizer_config.json next to config.json"
        )
    if len(model.stop_ids) > STOP_IDS:
        raise InputError(
            f"{path}: generation_config.json lists {len(model.stop_ids)} stop tokens; a server takes {STOP_IDS}"
        )
    positions = model.hf_config.get("max_position_embeddings")
    length = opening.length or min(positions or DEFAULT_LENGTH, DEFAULT_LENGTH)
    if positions and length > positions:
        raise InputError(
            f"--max-model-len {length}: {path} was made for {positions} tokens, see max_position_embeddings in its "
            "config.json"
        )
    sampler = _sampler(model, length, opening)
    sampler.warm_up(model.params, [1])
    day = artifacts.read_contract(local_directory(path)).get("template_date")
    options = TextOptions(None, {}, day)
    encoder = Encoder(model.tokenizer, options)
    conversations = ConversationEncoder(model.tokenizer, options, model.stop_ids)
    policy = Policy(model, sampler)
    policy.warm_up()
    return ServedPolicy(name, path, policy, length, encoder, conversations)


def load_policy(path: str | Path, opening: Opening) -> Model:
    """Load a language model; an adapter is merged into its base, unless that is quantized."""
    model = load_model(str(path), registry=opening.registry, mesh=opening.mesh, quantized=opening.quantize)
    if model.tokenizer is not None and opening.chat_template is not None:
        tokenizer = with_template_and_stop_ids(model.tokenizer, opening.chat_template, model.source)
        model = replace(model, tokenizer=tokenizer)
    return model if model.definition.lora is None or model.quantized else model.merged()


def _sampler(model: Model, length: int, opening: Opening) -> ConversationSampler:
    from rlhf_core.sampling.sampler import keeps_caches

    if not keeps_caches(model.definition, model.mesh):
        raise InputError(
            f"{model.source}: models of {type(model.definition).__name__} with this config.json cannot be served: "
            "their state cannot be kept in slots; rlhf generate completes prompts"
        )
    inputs = SamplerInputs(
        definition=model.definition,
        options=SamplingOptions(max_completion_length=length),
        mesh=model.mesh,
        stop_ids=model.stop_ids,
        prompts_per_call=opening.slots,
        max_prompt_length=1,
        tokenizer=model.tokenizer,
        memory=_memory(model),
        conversation_length=length,
    )
    return ConversationSampler(inputs, ALTERNATIVES)


def _memory(model: Model) -> int | None:
    """Return the bytes that a device has left, None where unknown."""
    device = model.mesh.devices.flat[0]
    if device.platform == "cpu":
        return None
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    used = stats.get("bytes_in_use", 0)
    return None if limit is None else int((limit - used) * 0.9)
