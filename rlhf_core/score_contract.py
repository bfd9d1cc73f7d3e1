"""How a reward model has to be read, as its artifact records it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rlhf_core.encoding import special_ids, template_text
from rlhf_core.errors import InputError
from rlhf_core.text_options import ReadAt, TextOptions
from rlhf_core.tokenizer import template_hash, tokenizer_hash


@dataclass(frozen=True)
class Contract:
    """How a reward model was trained: what whoever uses its scores has to repeat.

    max_length: tokens, EOS included; None: the model's own limit. truncation_mode: which end of a longer
    sequence is kept.
    chat_template: "plain" or Jinja text; None: the tokenizer's own. template_hash: of its text, None without
    one.
    special_tokens: {bos, eos, pad} ids. pooling: which token the score is read at.
    read_at: where a conversation ends: "eos", after the stop token behind its last reply, or "template", where its chat
    template ends, as TRL and others train. chat_template_kwargs, template_date, prompt_repeated: as in `TextOptions`.
    mean, std: of the scores on its evaluation data (without any, of some of its training data), reward units;
    None where they were not taken.
    evaluation: the metrics on its evaluation data; None where it had none.
    compute_dtype: "float32" or "bfloat16", in which it was trained and evaluated; None: not recorded.
    base: a hash of the weights of the base model that its adapter was trained on; None: it has no adapter.
    """

    max_length: int | None
    truncation_mode: Literal["keep_end", "keep_start"]
    chat_template: str | None
    template_hash: str | None
    tokenizer_hash: str
    special_tokens: Mapping[str, Any]
    pooling: Literal["last_token"] = "last_token"
    read_at: ReadAt = "eos"
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    template_date: str | None = None
    prompt_repeated: bool | None = None
    mean: float | None = None
    std: float | None = None
    evaluation: Mapping[str, float] | None = None
    compute_dtype: str | None = None
    base: str | None = None

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        *,
        max_length: int | None,
        truncation_mode: Literal["keep_end", "keep_start"] = "keep_end",
        chat_template: str | TextOptions | None = None,
        mean: float | None = None,
        std: float | None = None,
    ) -> Contract:
        """The contract of a model trained with `tokenizer`.

        chat_template: None, "plain", or a file, whose text is kept; or all options.
        """
        options = TextOptions.of(chat_template)
        kept = options.chat_template
        kept = kept if kept in (None, "plain") else template_text(tokenizer, kept)
        special = special_ids(tokenizer, kept)
        return cls(
            max_length=max_length,
            truncation_mode=truncation_mode,
            chat_template=kept,
            template_hash=template_hash(tokenizer, kept),
            tokenizer_hash=tokenizer_hash(tokenizer),
            special_tokens={"bos": special.bos, "eos": list(special.eos), "pad": special.pad},
            read_at=options.read_at,
            chat_template_kwargs=dict(options.chat_template_kwargs),
            template_date=options.template_date,
            prompt_repeated=options.prompt_repeated,
            mean=mean,
            std=std,
        )

    @property
    def text_options(self) -> TextOptions:
        """How its texts become tokens."""
        return TextOptions(
            self.chat_template,
            self.chat_template_kwargs,
            self.template_date,
            self.read_at,
            self.prompt_repeated,
        )

    def to_dict(self) -> dict[str, Any]:
        """As `rlhf_artifact.json` holds it, under "contract"."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any], where: str) -> Contract:
        """The inverse of `to_dict`; raises InputError, naming `where`, for a contract of another version."""
        fields = dataclasses.fields(cls)
        if not given:
            raise InputError(
                f"{where}: the reward model was saved without a contract, so nobody knows how to read its scores; its "
                "trainer gives artifacts.save_model one, contract=Contract.of(tokenizer, max_length=…).to_dict(), from "
                "rlhf_core.scoring"
            )
        missing = dataclasses.MISSING
        needed = {f.name for f in fields if f.default is missing and f.default_factory is missing}
        odd = (needed - set(given)) | (set(given) - {f.name for f in fields})
        if odd:
            listed = ", ".join(sorted(odd))
            raise InputError(f"{where}: the reward model's contract is not one this version knows ({listed})")
        return cls(**given)

    def require_statistics(self, where: str | Path) -> None:
        """Raises InputError, naming `where` the contract comes from, where scores cannot be normalized."""
        if self.mean is None or self.std is None:
            raise InputError(
                f"{where}: cannot normalize: no mean and standard deviation of its scores are stored. The output of "
                "a reward stage, DIR/STAGE/artifacts/model, has them; or leave normalize out"
            )
        if not self.std > 0:
            raise InputError(
                f"{where}: cannot normalize: the stored standard deviation of its scores is {self.std:g}, all "
                "were equal; train it on more, or leave normalize out"
            )

    def normalized(self, scores: np.ndarray) -> np.ndarray:
        """(scores - mean) / std, float32: mean 0 and standard deviation 1 on its evaluation data."""
        assert self.mean is not None
        assert self.std is not None
        return ((np.asarray(scores, np.float64) - self.mean) / self.std).astype(np.float32)
