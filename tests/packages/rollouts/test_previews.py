"""Previews: which prompts, what is written, printed and logged, and that they change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from rlhf_core import hookimpl
from rlhf_core.config import TrainerConfig
from rlhf_core.mesh import make_mesh
from rlhf_core.rollouts.previews import prompt_of

SHOWN = {"prompts": ["a b"], "from_data": True, "every": 2, "count": 2, "num_return": 2, "max_new_tokens": 5}


class Samples:
    """A logger that keeps what it is told of completions, and interrupts where it is asked to."""

    def __init__(self, until: int = 10**9) -> None:
        self.until = until
        self.told: list[tuple[int, str, list[Any]]] = []

    @hookimpl
    def rlhf_samples(self, step: int, name: str, rows: list[Any]) -> None:
        self.told.append((step, name, rows))

    @hookimpl
    def rlhf_step_end(self, step: int) -> None:
        if step == self.until:
            raise KeyboardInterrupt


def files(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(directory.glob("samples/preview-*"))}


@pytest.mark.parametrize(
    "trainer", ["grpo", *(pytest.param(name, marks=pytest.mark.long) for name in ("sft", "dpo"))]
)
def test_previews_are_written_printed_and_logged_and_change_nothing(
    short: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], trainer: str
) -> None:
    plain, _ = short.train(trainer, at="plain")
    capsys.readouterr()
    watch = Samples()
    found, _ = short.train(trainer, at="shown", listeners=(watch,), previews=SHOWN)
    for path, leaf in plain.items():
        np.testing.assert_array_equal(leaf, found[path], err_msg=path)
    written = files(tmp_path / "shown" / trainer)
    assert list(written) == [f"preview-{step:06d}.jsonl" for step in (0, 2, 4, 6)]
    told = [(step, rows) for step, name, rows in watch.told if name == "preview"]
    assert [step for step, _ in told] == [0, 2, 4, 6]
    for (_, rows), text in zip(told, written.values(), strict=True):
        assert rows == [json.loads(line) for line in text.splitlines()]
        assert len(rows) == 6  # one prompt and two of the data, twice
        assert rows[0]["prompt"] == rows[1]["prompt"] == "a b"
        assert rows[2]["prompt"] == short.rows[trainer][0]["prompt"]
        assert all(1 <= row["length"] <= 5 for row in rows)
    err = capsys.readouterr().err
    assert "after update 4, completion 6 of 6" in err
    assert len(set(written.values())) == 4  # the policy moves


def test_a_resumed_run_has_the_same_previews(short: Any, tmp_path: Path) -> None:
    short.train("sft", at="whole", previews=SHOWN)
    with pytest.raises(KeyboardInterrupt):
        short.train("sft", at="again", listeners=(Samples(5),), save_steps=3, previews=SHOWN)
    assert "preview-000004.jsonl" in files(tmp_path / "again/sft")  # after the checkpoint: made again
    short.train("sft", at="again", previews=SHOWN)
    assert files(tmp_path / "again/sft") == files(tmp_path / "whole/sft")


def test_previews_on_a_mesh(short: Any, tmp_path: Path) -> None:
    greedy = {**SHOWN, "temperature": 0.0, "num_return": 1, "every": 6}
    short.train("sft", at="one", previews=greedy, max_training_steps=1)
    devices = make_mesh(tensor=2, fsdp=2, devices=jax.devices()[:4])
    short.train("sft", at="mesh", previews=greedy, max_training_steps=1, inputs={"mesh": devices})
    one, many = (files(tmp_path / at / "sft")["preview-000000.jsonl"] for at in ("one", "mesh"))
    assert one == many


def test_the_names_of_easydel_ask_for_them(short: Any, tmp_path: Path) -> None:
    given = {
        "generation_interval": 3,
        "generation_prompts": ["a b"],
        "generation_seed": 5,
        "generation_top_k": 3,
    }
    given |= {"generation_do_sample": False, "generation_extra_kwargs": {"max_new_tokens": 2}}
    watch = Samples()
    short.train("sft", listeners=(watch,), **given, generation_log_to_wandb=False)
    assert watch.told == []
    assert list(files(tmp_path / "sft")) == [f"preview-{step:06d}.jsonl" for step in (0, 3, 6)]
    (row,) = map(json.loads, files(tmp_path / "sft")["preview-000006.jsonl"].splitlines())
    assert row["length"] <= 2


def test_fields_without_an_interval_or_prompts_ask_for_nothing() -> None:
    with pytest.warns(
        UserWarning, match=r"generation_temperature: has no effect here: previews\.every is not given"
    ):
        assert TrainerConfig(generation_temperature=0.5, generation_num_prompts=1).previews is None
    assert TrainerConfig(generation_use_train_prompts=True).previews is not None
    config = TrainerConfig(generation_interval=10, generation_num_prompts=1, generation_prompts=[])
    assert (config.previews.every, config.previews.count, config.previews.from_data) == (10, 1, None)


def test_the_first_rows_of_a_stream_are_previewed(short: Any, tmp_path: Path) -> None:
    def rows() -> Any:
        yield from short.rows["sft"]

    shown = {"every": 6, "count": 3, "max_new_tokens": 2}
    short.train("sft", previews=shown, max_training_steps=1, inputs={"train_dataset": rows})
    lines = files(tmp_path / "sft")["preview-000000.jsonl"].splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == [row["prompt"] for row in short.rows["sft"][:3]]


def test_a_reward_model_shows_no_completions(short: Any) -> None:
    with pytest.warns(
        UserWarning, match=r"'reward'\.previews: has no effect: the trainer shows no completions"
    ):
        short.train("reward", max_training_steps=1, previews={"prompts": ["a"]})


def test_the_prompts_of_rows() -> None:
    user, reply, other = (
        {"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b"), ("assistant", "c"))
    )
    assert prompt_of({"prompt": "a b", "chosen": " c"}) == "a b"
    assert prompt_of({"question": "x"}, "question") == "x"
    assert prompt_of({"messages": [user, reply, user, reply]}) == [user, reply, user]
    assert prompt_of({"chosen": [user, reply], "rejected": [user, other]}) == [user]
    assert prompt_of({"chosen": "how are you fine", "rejected": "how are you fire"}) == "how are you"
    assert prompt_of({"text": "a b"}) is None


def test_what_they_take_is_forecast(place: Any, rlhf: Any) -> None:
    def memory(*flags: str) -> str:
        words = " ".join(rlhf("check", "base.toml", *flags).out.split())
        return words.partition(" memory about ")[2].partition(" process ")[0]

    assert "previews" not in memory()
    assert "previews" in memory("--set", 'base.previews={prompts=["a"]}')
