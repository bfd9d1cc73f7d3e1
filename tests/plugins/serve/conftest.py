"""One server for all tests of a module, in a thread of this process, with a tiny policy and a tiny reward model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.shared import serving

SLOTS, LENGTH = 32, 96
CHAT = (
    "{%- if tools %}T {% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
    "{%- for message in messages %}{% if message.role == 'user' %}Q {% else %}A {% endif %}"
    "{{ message.content or '' }}{% for call in message.tool_calls or [] %}<tool_call>\n"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n</tool_call>{% endfor %}"
    "{% if message.role != 'user' %}</s>{% endif %} {% endfor %}{% if add_generation_prompt %}A {% endif %}"
)
"""A chat template that writes tool calls as Hermes and Qwen do."""


@pytest.fixture(scope="module")
def directory(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    policy, reward = tiny.make_model(scale=8), tiny.make_model("score", scale=8)
    for model in (policy, reward):
        model.tokenizer.chat_template = CHAT
    policy.save(path / "policy")
    reward.save(path / "rm")
    return path


@pytest.fixture(scope="module")
def opened(tiny: Any, directory: Path) -> dict[str, Any]:
    # On one device, to compile less; the reward model on all, as commands are.
    policy = serving.opened(directory / "policy", slots=SLOTS, length=LENGTH, mesh=tiny.one_device())
    return {"policy": policy, "rm": serving.opened(directory / "rm")}


@pytest.fixture(scope="module")
def running(opened: dict[str, Any]) -> Iterator[serving.Running]:
    running = serving.serve(opened)
    yield running
    running.close()
