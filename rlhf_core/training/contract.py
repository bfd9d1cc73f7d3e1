"""The contract that a reward model is saved with: how its texts were read, and its scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlhf_core.scoring import Contract, base_identity
from rlhf_core.stage.text_settings import read_at_of, text_options

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rlhf_core.config import TrainerConfig
    from rlhf_core.models import Model
    from rlhf_core.stage import Stage
    from rlhf_core.tokenizer.options import ReadAt


def scoring_contract(
    config: TrainerConfig,
    stage: Stage,
    model: Model,
    *,
    read_at: ReadAt | None = "eos",
    scores: NDArray[Any] | None = None,
    evaluation: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return what a reward model's scores depend on, for `save_model(…, contract=…)`; a `Scorer` reads it.

    read_at: where its conversations ended, as for `open_pairs`. scores: of its evaluation data, else of some training
    data, reward units; their mean and standard deviation are stored, without which they cannot be normalized.
    evaluation: the metrics on its evaluation data.
    """
    contract = Contract.of(
        model.tokenizer,
        max_length=config.max_sequence_length,
        truncation_mode=config.truncation_mode,
        chat_template=text_options(config, stage, read_at=read_at_of(config, stage, read_at)),
        mean=None if scores is None else float(scores.mean()),
        std=None if scores is None else float(scores.std()),
    )
    return replace(
        contract, evaluation=evaluation, compute_dtype=model.computes_in, base=base_identity(model)
    ).to_dict()
