"""Options of an SFT stage: those that every trainer shares."""

from rlhf_core import TrainerConfig


class SFTConfig(TrainerConfig):
    """Next-token training. Rows are `text`, `prompt` + `completion`, or `messages`; only completions are trained on."""
