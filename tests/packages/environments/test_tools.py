"""Functions as tools: their schemas, the checks of arguments, and what goes back to the policy."""

from __future__ import annotations

import asyncio
import enum
from pathlib import Path
from typing import Any, Literal

import pytest

from rlhf_core.contracts import Turn
from rlhf_core.environments import ToolEnvironment
from rlhf_core.errors import InputError, Stopped


class Unit(enum.Enum):
    METRE = "m"
    MILE = "mi"


def add(a: int, b: float = 1) -> float:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def look_up(word: Literal["sky", "sea"], places: list[dict[str, int]] | None = None) -> str:
    """Look a word up.

    Args:
        word: What to look up.
        places: Where.
    """
    await asyncio.sleep(0)
    return f"{word} is blue {places}"


def measure(size: tuple[int, int], unit: Unit, colour: str = "red") -> Any:
    """Measure things.

    Args:
        size: Width and height.
        unit: Its unit.
        colour: Of the tape (choices: ["red", "blue"])
    """
    return {"area": size[0] * size[1], "unit": unit.value, "é": None}


def fails(how: str) -> str:
    """Fail.

    Args:
        how: In which way.
    """
    if how == "file":
        Path("/no/such directory/of/mine.txt").read_text()
    if how == "exit":
        raise SystemExit(3)
    if how == "stop":
        raise Stopped
    if how == "surrogate":
        return "\ud800"
    if how == "mute":
        raise Mute
    raise ValueError(how if len(how) > 200 else "first line\nsecond line " + "x" * 1000)


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError


ENVIRONMENT = ToolEnvironment([add, look_up, measure, fails])


def call(name: str, arguments: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


def step(*calls: dict[str, Any], **more: Any) -> Turn:
    return asyncio.run(
        ENVIRONMENT.step({"role": "assistant", "content": "", "tool_calls": list(calls), **more})
    )


def answer(name: str, arguments: Any) -> str:
    (message,) = step(call(name, arguments)).messages
    return str(message["content"])


def test_schemas_are_those_of_transformers_and_an_episode_begins_with_the_prompt_of_its_row() -> None:
    function = ENVIRONMENT.tools[0]["function"]
    assert function["name"] == "add"
    assert function["description"] == "Add two numbers."
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "The first."},
            "b": {"type": "number", "description": "The second."},
        },
        "required": ["a"],
    }

    said = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert ENVIRONMENT.reset({"prompt": said}, 3) == said
    assert ENVIRONMENT.reset({"prompt": "u"}, 3) == said[1:]
    with pytest.raises(InputError, match=r"the row has no 'prompt' \(it has question\)"):
        ENVIRONMENT.reset({"question": "u"}, 3)


def test_calls_run_in_their_order_and_malformed_ones_are_answered() -> None:
    turn = step(
        call("add", {"a": 1, "b": 2.5}, id="x1"), call("look_up", {"word": "sky", "places": [{"a": 1}]})
    )
    assert turn == Turn(
        [
            {"role": "tool", "name": "add", "content": "3.5", "tool_call_id": "x1"},
            {"role": "tool", "name": "look_up", "content": "sky is blue [{'a': 1}]"},
        ],
        metrics={"calls": 2.0, "call_errors": 0.0},
    )

    turn = step()
    assert turn.done
    assert turn.reward is None
    assert turn.metrics == {"calls": 0.0, "call_errors": 0.0}
    assert not turn.messages

    turn = step(call("add", {"a": 1}), call_errors=["the call is not JSON: …"])
    assert [message["content"] for message in turn.messages] == ["2", "Error: the call is not JSON: …"]
    assert not turn.done
    assert turn.metrics == {"calls": 2.0, "call_errors": 1.0}

    assert answer("measure", {"size": [2, 3], "unit": "mi"}) == '{"area": 6, "unit": "mi", "é": null}'
    assert answer("add", {"a": 1, "b": 2}) == "3.0"


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        (
            "ad",
            {},
            "Error: there is no tool 'ad'. Did you mean 'add'? The tools are add, look_up, measure, fails",
        ),
        ("add", {}, "Error: add cannot be called: it needs 'a'"),
        ("add", {"a": "1"}, "Error: add cannot be called: 'a': Input should be a valid integer"),
        ("add", {"a": 1.0}, "Error: add cannot be called: 'a': Input should be a valid integer"),
        ("add", {"a": True}, "Error: add cannot be called: 'a': Input should be a valid integer"),
        ("add", {"a": 1, "b": "2"}, "Error: add cannot be called: 'b': Input should be a valid number"),
        (
            "add",
            {"a": 1, "c": 2},
            "Error: add cannot be called: it has no parameter 'c'; its parameters are a, b",
        ),
        ("add", [1], "Error: the arguments of add are not an object such as {}"),
        (
            "look_up",
            {"word": "fire"},
            "Error: look_up cannot be called: 'word': Input should be 'sky' or 'sea'",
        ),
        (
            "look_up",
            {"word": "sky", "places": [{"a": 1}, {"b": "c"}]},
            "Error: look_up cannot be called: 'places.1.b': Input should be a valid integer",
        ),
        (
            "measure",
            {"size": [1, 2], "unit": "m", "colour": "green"},
            'Error: measure cannot be called: \'colour\' is not one of ["red", "blue"]',
        ),
        (
            "fails",
            {"how": "file"},
            "Error: fails raised FileNotFoundError: [Errno 2] No such file or directory: 'mine.txt'",
        ),
        ("fails", {"how": "exit"}, "Error: fails raised SystemExit: 3"),
        ("fails", {"how": "mute"}, "Error: fails raised Mute"),
        ("fails", {"how": "surrogate"}, "?"),
    ],
)
def test_what_is_wrong_goes_back_to_the_policy(name: str, arguments: Any, said: str) -> None:
    assert answer(name, arguments) == said


def test_errors_are_short_and_secrets_are_hidden_before_they_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match=r"tool 'fails' raised ValueError \(.*test_tools\.py line \d+\)"):
        content = answer("fails", {"how": "long"})
    assert content.startswith("Error: fails raised ValueError: first line second line xxx")
    assert len(content) < 330

    secret = "canary-" + 15 * "0123456789" + "/etc/key"
    monkeypatch.setenv("MY_API_KEY", secret)
    with pytest.warns(UserWarning, match="tool 'fails' raised"):
        content = answer("fails", {"how": "x" * 200 + secret})
    assert "xxx" + 10 * "*" in content
    assert "canary" not in content


def test_functions_by_name_and_signals_which_are_no_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Stopped):
        step(call("fails", {"how": "stop"}))

    monkeypatch.chdir(tmp_path)
    Path("calc.py").write_text(
        'def double(x: int) -> int:\n    """Double.\n\n    Args:\n        x: A number.\n    """\n    return 2 * x\n'
    )
    environment = ToolEnvironment(["calc.py:double"])
    assert environment.tools[0]["function"]["name"] == "double"
    turn = environment.step({"role": "assistant", "tool_calls": [call("double", {"x": 21})]})
    assert turn.messages[0]["content"] == "42"
