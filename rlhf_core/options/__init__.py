"""Configuration: strict, frozen, and with every problem reported at once, in the words of the user's file."""

from rlhf_core.options.base import Component as Component
from rlhf_core.options.base import Options as Options
from rlhf_core.options.build import FieldDoc as FieldDoc
from rlhf_core.options.build import build as build
from rlhf_core.options.build import fields as fields
from rlhf_core.options.build import parse_value as parse_value
from rlhf_core.options.paths import ArtifactKinds as ArtifactKinds
from rlhf_core.options.trainer import TrainerConfig as TrainerConfig

__all__ = [
    "ArtifactKinds",
    "Component",
    "FieldDoc",
    "Options",
    "TrainerConfig",
    "build",
    "fields",
    "parse_value",
]
