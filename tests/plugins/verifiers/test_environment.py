"""Tasks of verifiers are played by the trainer's policy, with their tools and rewards."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_core import InputError
from rlhf_core.testing import check_environment

REPOSITORY = Path(__file__).parents[3]
if importlib.util.find_spec("verifiers") is None:
    pytest.skip("needs the package verifiers: make test-verifiers installs it", allow_module_level=True)

TASKS = '''
import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str = ""


class Calculator(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


class Sum(vf.Task[Data]):
    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        if self.data.answer == "nothing":
            raise ValueError("no answer to compare with")
        return float((trace.branches[-1].messages[-1].content or "").strip() == self.data.answer)

    @vf.metric
    async def said(self, trace: vf.Trace) -> float:
        return float(len(trace.branches[-1].messages))


class Sums(vf.Taskset[Sum]):
    def load(self):
        for answer in ("1", "2", "nothing"):
            yield Sum(Data(prompt=f"a sum", answer=answer, system_prompt="Add."), self.config.task)


__all__ = ["Sums"]

if __name__ == "__main__":
    Calculator.run()
'''


@pytest.fixture(scope="module", autouse=True)
def tasksets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Two tasksets that can be imported, here and by the servers of tools: rlhf_sums, and rlhf_tools with a tool."""
    directory = tmp_path_factory.mktemp("tasksets")
    tools = "class Sum(vf.Task[Data]):\n    @classmethod\n    def toolsets(cls, config):\n"
    tools += "        return [Calculator(vf.ToolsetConfig())]\n"
    (directory / "rlhf_sums.py").write_text(TASKS)
    (directory / "rlhf_tools_sums.py").write_text(TASKS.replace("class Sum(vf.Task[Data]):\n", tools))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        patch.setenv("PYTHONPATH", str(directory))
        yield


def said(text: str, **call: Any) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if call:
        message["tool_calls"] = [{"type": "function", "function": call}]
    return message


def test_the_kit() -> None:
    from rlhf_verifiers import Tasks, Verifiers

    rows = list(Tasks("rlhf_sums", count=2))
    assert rows == [{"prompt": "a sum", "task": 0}, {"prompt": "a sum", "task": 1}]
    check_environment(Verifiers, rows, completions=["1", "3"], taskset="rlhf_sums")


def test_episodes_at_a_time_have_their_own_rewards() -> None:
    from rlhf_verifiers import Verifiers

    async def play(task: int, answer: str) -> Any:
        environment = Verifiers("rlhf_sums")
        assert environment.tools == []
        assert await environment.reset({"task": task}, 0) == [
            {"role": "system", "content": "Add."},
            {"role": "user", "content": "a sum"},
        ]
        return await environment.step(said(answer))

    async def both() -> list[Any]:
        return await asyncio.gather(*(play(task, answer) for task in (0, 1) for answer in "12"))

    turns = asyncio.run(both())
    assert [turn.reward for turn in turns] == [0.5, 0.0, 0.0, 0.5]
    assert all(turn.done and turn.messages == () and turn.metrics["said"] == 3 for turn in turns)


def test_calls_of_tools_are_answered() -> None:
    from rlhf_verifiers import Verifiers

    async def play() -> list[Any]:
        environment = Verifiers("rlhf_tools_sums")
        (tool,) = environment.tools
        assert tool["function"]["name"] == "calculator_add"
        await environment.reset({"task": 1}, 0)
        first = await environment.step(said("", name="calculator_add", arguments={"a": 1, "b": 1}))
        second = await environment.step(said("", name="subtract", arguments="{}"))
        return [first, second, await environment.step(said("2"))]

    first, second, last = asyncio.run(play())
    assert [(each["role"], each["content"]) for each in first.messages] == [("tool", "2")]
    assert "no tool 'subtract'" in second.messages[0]["content"]
    assert (last.reward, last.done) == (0.5, True)


def test_what_verifiers_finds_wrong_is_said() -> None:
    from rlhf_verifiers import Verifiers

    async def play() -> None:
        environment = Verifiers("rlhf_sums")
        await environment.reset({"task": 2}, 0)
        with pytest.raises(RuntimeError, match="no answer to compare with"):
            await environment.step(said("1"))
        with pytest.raises(InputError, match="task 9: taskset 'rlhf_sums' has 3"):
            await environment.reset({"task": 9}, 0)

    asyncio.run(play())
    with pytest.raises(InputError, match="taskset 'nowhere'"):
        Verifiers("nowhere")
    with pytest.raises(InputError, match="size"):
        Verifiers("rlhf_sums", {"size": 3})


def test_the_stage_of_the_page_is_trained(tiny: Any, tmp_path: Path) -> None:
    from rlhf_grpo import GRPOConfig

    page = (
        (REPOSITORY / "plugins/verifiers/README.md")
        .read_text(encoding="utf-8")
        .replace("my-tasks", "rlhf_sums")
    )
    (stage,) = tomllib.loads(page.split("```toml")[1].split("```")[0])["stage"]
    fields = {key: value for key, value in stage.items() if key not in ("name", "trainer", "model")}
    fields["train_data"]["count"] = 2
    sizes = {
        "total_batch_size": 8,
        "max_training_steps": 2,
        "max_prompt_length": 64,
        "chat_template": "plain",
    }
    config = GRPOConfig(**fields, **sizes, sampling={"max_completion_length": 4})
    tiny.run("grpo", config, tmp_path, model=tiny.make_model())
    (first, *_) = map(json.loads, (tmp_path / "samples/update-000000.jsonl").read_text().splitlines())
    assert [each["role"] for each in first["prompt"]] == ["system", "user"]
    metrics = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["episodes/failed"] == 0
    assert metrics["episodes/said"] == 3
