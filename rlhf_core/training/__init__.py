"""What trainers share: open models and data, forecast a stage, choose attention, run from Python."""

from rlhf_core.stage.alone import run_alone as run_alone
from rlhf_core.stage.text_settings import read_at_of as read_at_of
from rlhf_core.stage.text_settings import text_options as text_options
from rlhf_core.training.attention import choose_attention as choose_attention
from rlhf_core.training.forecast import forecast_lines as forecast_lines
from rlhf_core.training.open import open_model as open_model
from rlhf_core.training.open import open_pairs as open_pairs
from rlhf_core.training.open import open_records as open_records
from rlhf_core.training.open import open_rewards as open_rewards
from rlhf_core.training.open import open_texts as open_texts
from rlhf_core.training.open import try_loss as try_loss
from rlhf_core.training.padded import batch_arrays as batch_arrays
from rlhf_core.training.padded import evaluate_once as evaluate_once
from rlhf_core.training.padded import named_loss as named_loss
from rlhf_core.training.padded import update_once as update_once
from rlhf_core.training.python import python_trainer as python_trainer
from rlhf_core.training.reference import Reference as Reference
from rlhf_core.training.updates import dataset_updates as dataset_updates

__all__ = [
    "Reference",
    "batch_arrays",
    "choose_attention",
    "dataset_updates",
    "evaluate_once",
    "forecast_lines",
    "named_loss",
    "open_model",
    "open_pairs",
    "open_records",
    "open_rewards",
    "open_texts",
    "python_trainer",
    "read_at_of",
    "run_alone",
    "text_options",
    "try_loss",
    "update_once",
]
