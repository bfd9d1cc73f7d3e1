"""What trainers share: open models and data, forecast a stage, evaluate, run from Python."""

from rlhf_core.fit import Build as Build
from rlhf_core.rewards.reward import open_rewards as open_rewards
from rlhf_core.stage.alone import python_trainer as python_trainer
from rlhf_core.training.context import Context as Context
from rlhf_core.training.context import Evaluate as Evaluate
from rlhf_core.training.define import define_trainer as define_trainer
from rlhf_core.training.define import forecast as forecast
from rlhf_core.training.expected import Expected as Expected
from rlhf_core.training.expected import ModelNotHereError as ModelNotHereError
from rlhf_core.training.held_out import HeldOut as HeldOut
from rlhf_core.training.memory import device_bytes as device_bytes
from rlhf_core.training.memory import saved_bytes as saved_bytes
from rlhf_core.training.padded import PaddedObjective as PaddedObjective
from rlhf_core.training.padded import named_loss as named_loss
from rlhf_core.training.padded import padded_rows as padded_rows
from rlhf_core.training.reference import Reference as Reference
from rlhf_core.training.starting_model import definition_of as definition_of

__all__ = [
    "Build",
    "Context",
    "Evaluate",
    "HeldOut",
    "PaddedObjective",
    "Reference",
    "define_trainer",
    "named_loss",
    "open_rewards",
    "padded_rows",
    "python_trainer",
]
