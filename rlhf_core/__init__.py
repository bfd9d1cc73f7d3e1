"""rlhf-core: state, sharding, checkpoints, data and plugins for RLHF in JAX.

Public names are resolved on first use, so that importing this package does not import jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_core.config import Alias as Alias
    from rlhf_core.config import Component as Component
    from rlhf_core.config import NoEffect as NoEffect
    from rlhf_core.config import Options as Options
    from rlhf_core.config import Refused as Refused
    from rlhf_core.config import TrainerConfig as TrainerConfig
    from rlhf_core.contracts import ACTION as ACTION
    from rlhf_core.contracts import ADVANTAGE as ADVANTAGE
    from rlhf_core.contracts import ATTENTION as ATTENTION
    from rlhf_core.contracts import DATASET as DATASET
    from rlhf_core.contracts import ENVIRONMENT as ENVIRONMENT
    from rlhf_core.contracts import EXPERTS as EXPERTS
    from rlhf_core.contracts import LAYER as LAYER
    from rlhf_core.contracts import LOGGER as LOGGER
    from rlhf_core.contracts import MODEL as MODEL
    from rlhf_core.contracts import OPTIMIZER as OPTIMIZER
    from rlhf_core.contracts import PAIRWISE_LOSS as PAIRWISE_LOSS
    from rlhf_core.contracts import POLICY_LOSS as POLICY_LOSS
    from rlhf_core.contracts import REWARD as REWARD
    from rlhf_core.contracts import SAMPLER as SAMPLER
    from rlhf_core.contracts import TRAINER as TRAINER
    from rlhf_core.contracts import Advantage as Advantage
    from rlhf_core.contracts import AdvantageInputs as AdvantageInputs
    from rlhf_core.contracts import Artifact as Artifact
    from rlhf_core.contracts import Environment as Environment
    from rlhf_core.contracts import Forecast as Forecast
    from rlhf_core.contracts import Kind as Kind
    from rlhf_core.contracts import LossOutput as LossOutput
    from rlhf_core.contracts import ModelFamily as ModelFamily
    from rlhf_core.contracts import PairInputs as PairInputs
    from rlhf_core.contracts import PairwiseLoss as PairwiseLoss
    from rlhf_core.contracts import PolicyInputs as PolicyInputs
    from rlhf_core.contracts import PolicyLoss as PolicyLoss
    from rlhf_core.contracts import RewardInputs as RewardInputs
    from rlhf_core.contracts import Rollouts as Rollouts
    from rlhf_core.contracts import Rows as Rows
    from rlhf_core.contracts import SamplerInputs as SamplerInputs
    from rlhf_core.contracts import Trainer as Trainer
    from rlhf_core.contracts import Turn as Turn
    from rlhf_core.errors import InputError as InputError
    from rlhf_core.errors import RunError as RunError
    from rlhf_core.models import load_model as load_model
    from rlhf_core.pipeline import run_pipeline as run_pipeline
    from rlhf_core.plugins import installed_registry as installed_registry
    from rlhf_core.plugins.hooks import hookimpl as hookimpl
    from rlhf_core.plugins.registry import Registry as Registry
    from rlhf_core.rollouts.config import RolloutConfig as RolloutConfig
    from rlhf_core.stage import Stage as Stage
    from rlhf_core.state import TrainState as TrainState
    from rlhf_core.state import create_state as create_state

_CONTRACTS = (
    "ACTION ADVANTAGE ATTENTION DATASET ENVIRONMENT EXPERTS LAYER LOGGER MODEL OPTIMIZER PAIRWISE_LOSS POLICY_LOSS "
    "REWARD SAMPLER TRAINER Advantage AdvantageInputs Artifact Environment Forecast Kind LossOutput ModelFamily "
    "PairInputs PairwiseLoss PolicyInputs PolicyLoss RewardInputs Rollouts Rows SamplerInputs Trainer Turn"
)
_HOMES = {
    **dict.fromkeys(_CONTRACTS.split(), "contracts"),
    **dict.fromkeys(("Alias", "Component", "NoEffect", "Options", "Refused", "TrainerConfig"), "config"),
    **dict.fromkeys(("InputError", "RunError"), "errors"),
    **dict.fromkeys(("TrainState", "create_state"), "state"),
    "Registry": "plugins.registry",
    "installed_registry": "plugins",
    "Stage": "stage",
    "hookimpl": "plugins.hooks",
    "load_model": "models",
    "RolloutConfig": "rollouts.config",
    "run_pipeline": "pipeline",
}
__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rlhf_core' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"rlhf_core.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
