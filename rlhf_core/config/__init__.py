"""Strict, frozen configuration, which reports all problems together, in the words of the user's file."""

from rlhf_core.config.build import FieldDoc as FieldDoc
from rlhf_core.config.build import build as build
from rlhf_core.config.build import fields as fields
from rlhf_core.config.build import parse_value as parse_value
from rlhf_core.config.options import Component as Component
from rlhf_core.config.options import Options as Options
from rlhf_core.config.paths import ArtifactKinds as ArtifactKinds
from rlhf_core.config.secrets import public_table as public_table
from rlhf_core.config.trainer import TrainerConfig as TrainerConfig
from rlhf_core.config.translation import Alias as Alias
from rlhf_core.config.translation import NoEffect as NoEffect
from rlhf_core.config.translation import Refused as Refused
from rlhf_core.hidden import HIDDEN as HIDDEN
from rlhf_core.hidden import remember as remember

__all__ = [
    "Alias",
    "ArtifactKinds",
    "Component",
    "FieldDoc",
    "NoEffect",
    "Options",
    "Refused",
    "TrainerConfig",
    "build",
    "fields",
    "parse_value",
]
