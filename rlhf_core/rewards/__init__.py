"""Rewards that need no weights."""

from rlhf_core.rewards.answers import Regex as Regex
from rlhf_core.rewards.answers import SoftOverlong as SoftOverlong
from rlhf_core.rewards.answers import exact_match as exact_match
from rlhf_core.rewards.answers import length as length
from rlhf_core.rewards.answers import numeric_answer as numeric_answer
from rlhf_core.rewards.answers import repetition as repetition
from rlhf_core.rewards.math import MathVerify as MathVerify
