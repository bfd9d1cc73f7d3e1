"""Completions of a rollout in the terminal."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from rlhf_core.contracts import RewardInputs
from rlhf_core.rollouts import Rollout
from rlhf_core.rollouts.rollout import completion_lines
from rlhf_core.runtime.terminal import escape_control
from rlhf_core.sampling import Rollouts


def rollout(prompts, completions, rewards):
    n = len(completions)
    samples = Rollouts(
        np.ones((n, 3), np.int32), np.full(n, 3, np.int32), np.zeros((n, 3), np.float32), np.arange(n) > 0
    )
    inputs = RewardInputs(prompts, completions, [[1] * 3] * n, {})
    rewards = np.array(rewards, np.float64)
    return Rollout(np.arange(n), samples, rewards, np.nansum(rewards, 1), inputs)


def shown(rollout, labels, count):
    return list(completion_lines(rollout, [SimpleNamespace(label=label) for label in labels], count))


def test_printed_completions_are_evenly_spread_with_their_rewards_and_roles():
    many = rollout(["p"] * 7, [f"c{i}" for i in range(7)], [[i / 2] for i in range(7)])
    texts = shown(many, ["right"], 3)
    assert [text.splitlines()[0] for text in texts] == [
        "completion 1 of 7  reward 0  3 tokens, cut",
        "completion 4 of 7  reward 1.5  3 tokens",
        "completion 7 of 7  reward 3  3 tokens",
    ]
    assert len(shown(many, ["right"], 100)) == 7
    assert shown(many, ["right"], 0) == []
    advantaged = replace(many, advantages=np.arange(7, dtype=np.float32))
    assert shown(advantaged, ["right"], 2)[1].startswith(
        "completion 7 of 7  reward 3  advantage 6  3 tokens\n"
    )

    two = rollout(["p"], ["c"], [[1.0, np.nan]])
    assert shown(two, ["right", "short"], 1)[0].startswith("completion 1 of 1  reward 1  right 1  short –  3")
    assert shown(rollout(["p"], ["c"], [[1.0]]), [], 1)[0].startswith("completion 1 of 1  3 tokens")

    ask = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?\nSay."}]
    call = {"function": {"name": "add", "arguments": "{}"}}
    said = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "3"}]
    one, several = shown(
        rollout([ask, ask], [[{"role": "assistant", "content": "So."}], said], [[1], [1]]), ["r"], 2
    )
    assert one.splitlines()[1:] == ["  after system: Be brief. user: Why? Say.", "  │ So."]
    assert several.splitlines()[2:] == [f"  │ assistant: {[call]}", "  │ tool: 3"]


def test_no_line_of_a_completion_can_pass_for_another_and_none_drives_the_terminal():
    evil = "\x1b[2Jok\r[policy] done\n[policy] saved model\u2028x\n\n"
    text = escape_control(shown(rollout(["a" * 300], [evil + "b" * 2000], [[1]]), ["r"], 1)[0])
    first, prompt, *lines = text.split("\n")
    assert first.startswith("completion 1 of 1")
    assert prompt == "  after …" + "a" * 199
    assert all(line.startswith("  │ ") for line in lines)
    assert "\x1b" not in text
    assert "\r" not in text
    assert text.endswith(f"… ({2000 + len(evil):,} characters)")
    assert shown(rollout(["p"], [""], [[1]]), ["r"], 1)[0].endswith("  │ (nothing)")
