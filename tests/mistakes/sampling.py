"""Options of sampling, previews, tools of environments and logged weights that do not do."""

from __future__ import annotations

from rlhf_core.config import TrainerConfig
from rlhf_core.environments import ToolEnvironment
from rlhf_core.sampling import token_bytes
from tests.mistakes.mistake import Mistake, call, setting

TOOLS = '''
import datetime

def silent(x: int) -> int:
    return x

def untyped(x) -> None:
    """Do.

    Args:
        x: It.
    """

def undescribed(x: int) -> None:
    """Do."""

def several(*words: str) -> None:
    """Do.

    Args:
        words: Them.
    """

def odd(when: datetime.datetime) -> None:
    """Do.

    Args:
        when: Then.
    """

def double(x: int) -> int:
    """Double.

    Args:
        x: A number.
    """
    return 2 * x

nameless = lambda x: x
'''


def tools(*names: str) -> Mistake:
    """Tools of a file."""
    given = [f"tools.py:{name}" for name in names]
    title = f"ToolEnvironment of {', '.join(names)}"
    return call(title, lambda place: ToolEnvironment(given), lambda place: place.write("tools.py", TOOLS))


def sampling(options: str) -> Mistake:
    return setting(f"sampling = {{ max_completion_length = 4, {options} }}", command="check policy.toml")


OPTIONS = [
    sampling("temperature = -1.0"),
    sampling("top_p = 0.0"),
    sampling("top_k = 0"),
    sampling("min_p = 2.0"),
    sampling("repetition_penalty = 0.0"),
    sampling('stop_strings = ["a", ""]'),
    sampling('stop_strings = "a"'),
    sampling("stop_token_ids = [-1]"),
    call("token_bytes of what is no fast tokenizer", lambda place: token_bytes(object())),
]
SHOWN = [
    setting("previews = { from_data = false, every = 2 }", command="check base.toml"),
    setting("previews = { every = 2, sampling = { min_q = 0.1 } }", command="check base.toml"),
    call("generation_temperature alone", lambda place: TrainerConfig(generation_temperature=0.5)),
    call("log_weights = {pattern: '['}", lambda place: TrainerConfig(log_weights={"pattern": "["})),
    call("weight_distribution_pattern alone", lambda place: TrainerConfig(weight_distribution_pattern="mlp")),
    setting('log_weights = { pattern = "mpl", every = 1 }'),
]
SECTIONS = {
    "Options of sampling": OPTIONS,
    "Previews and logged weights": SHOWN,
    "Tools of an environment": [
        tools("silent"),
        tools("untyped"),
        tools("undescribed"),
        tools("several"),
        tools("odd"),
        tools("nameless"),
        tools("doubel"),
        tools("silent", "double", "double", "undescribed"),
    ],
}
