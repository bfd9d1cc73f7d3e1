"""What trainers share: open models and data, forecast a stage, evaluate, run from Python."""

from rlhf_core.rewards.reward import open_rewards as open_rewards
from rlhf_core.training.build import Build as Build
from rlhf_core.training.build import define_trainer as define_trainer
from rlhf_core.training.context import Context as Context
from rlhf_core.training.contract import scoring_contract as scoring_contract
from rlhf_core.training.forecast import forecast_lines as forecast_lines
from rlhf_core.training.held_out import HeldOut as HeldOut
from rlhf_core.training.open import open_model as open_model
from rlhf_core.training.open import open_pairs as open_pairs
from rlhf_core.training.open import open_texts as open_texts
from rlhf_core.training.open import try_loss as try_loss
from rlhf_core.training.padded import PaddedObjective as PaddedObjective
from rlhf_core.training.padded import named_loss as named_loss
from rlhf_core.training.programs import dataset_programs as dataset_programs
from rlhf_core.training.python import python_trainer as python_trainer
from rlhf_core.training.reference import Reference as Reference
from rlhf_core.training.updates import dataset_updates as dataset_updates

__all__ = [
    "Build",
    "Context",
    "HeldOut",
    "PaddedObjective",
    "Reference",
    "dataset_programs",
    "dataset_updates",
    "define_trainer",
    "forecast_lines",
    "named_loss",
    "open_model",
    "open_pairs",
    "open_rewards",
    "open_texts",
    "python_trainer",
    "scoring_contract",
    "try_loss",
]
