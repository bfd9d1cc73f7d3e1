"""The reward `model`: a trained reward model as a reward function, for any trainer that asks for rewards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhf_core import InputError
from rlhf_core.scoring import Scorer

if TYPE_CHECKING:
    from rlhf_core import Stage


@dataclass
class ModelReward:
    """Score prompt and completion exactly as the reward model was trained to read them.

    model: a reward model's artifact or a ForSequenceClassification directory.
    normalize: subtract the mean and divide by the standard deviation of the scores on the reward model's evaluation
        data, which are stored in its artifact.
    """

    model: str
    normalize: bool = False
    _scorer: Scorer | None = field(default=None, init=False, repr=False)

    def check(self, columns: Mapping[str, Sequence[Any]]) -> Mapping[int, str]:
        """Raise InputError where the files of a local model show that it cannot score; nothing is loaded."""
        Scorer.check(self.model)
        return {}

    def setup(self, stage: Stage) -> None:
        """Load the weights onto the stage's mesh. Raises InputError where there is nothing to normalize with."""
        self._scorer = Scorer.load(
            self.model, mesh=stage.devices(), registry=stage.registry, normalize=self.normalize
        )

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        """Return one score per completion, in reward units, or in standard deviations where normalized.

        Columns `tools` and `chat_template_kwargs` are part of the conversations, as in training. A completion cut off
        at the policy's length limit is scored as if it ended there, since reward models have only seen texts that end.
        """
        if self._scorer is None:
            raise RuntimeError("call setup(stage) before the first call")
        try:
            scores = self._scorer.score_completions(
                prompts, completions, columns.get("tools"), columns.get("chat_template_kwargs")
            )
        except InputError as error:  # such as conversations, for a model that was trained on plain texts
            raise InputError(
                *(f"reward model {self.model}: {problem}" for problem in error.problems)
            ) from error
        return [None if math.isnan(score) else float(score) for score in scores]

    def snapshot(self) -> dict[str, Any]:
        """Return the row shapes chosen for the first texts, on which the last bits of scores depend."""
        return {} if self._scorer is None else self._scorer.snapshot()

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore a `snapshot` after `setup`; a mesh that these shapes do not fit gets others."""
        if self._scorer is not None:
            self._scorer.restore(saved)
