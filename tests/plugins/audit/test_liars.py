"""Samplers that lie: the run refuses them, or a check of `rlhf audit` names them after three rollouts."""

from contextlib import nullcontext

import pytest
from rlhf_audit import audit
from rlhf_grpo import GRPOConfig

from rlhf_core import SAMPLER, hookimpl
from rlhf_core.errors import RunError
from rlhf_core.testing import LIES, lying_sampler

CONFIG = GRPOConfig(
    total_batch_size=128,
    num_generations=8,
    max_completion_length=8,
    max_training_steps=3,
    learning_rate=2e-2,
    weight_decay=0.0,
    log_steps=1,
    num_preview_samples=0,
    sampler={"name": "watched"},
)


def early(completions):
    return [sum("a" <= word <= "m" for word in text.split()) / 6 for text in completions]


class Watched:
    """A sampler that lies, or not."""

    def __init__(self, lie):
        self.lie = lie

    @hookimpl
    def rlhf_register(self, registry):
        def make(inputs):
            honest = registry.get(SAMPLER, "jax")
            return honest(inputs) if self.lie is None else lying_sampler(self.lie, honest)(inputs)

        registry.add(SAMPLER, "watched", make)


def run(tiny, place, lie, **changes):
    """Run three updates."""
    model = tiny.make_model(scale=4.0)
    tiny.run(
        "grpo",
        CONFIG.replace(**changes),
        place,
        listeners=[Watched(lie)],
        model=model,
        rewards=[early],
        train_dataset=tiny.prompts(48),
    )


ENDED = {"greedy", "top_k", "two_late"}
"""Lies that the sampling test of the run itself ends within three rollouts."""
NAMED = {
    "greedy": "sampling test",
    # Its gap is 0.06 nats per token here: the evidence of 2,900 tokens does not suffice, see `tokens_needed`.
    "colder": "trainer against sampler",
    "top_k": "sampling test",
    "other_prompt": "trainer against sampler",
    "one_late": "trainer against sampler",
    "two_late": "trainer against sampler",
    "two_digits": "rounded log-probabilities",
    "sent_twice": "equal completions",
}


@pytest.mark.long
@pytest.mark.parametrize("lie", [None, *NAMED])
def test_a_lie_is_named(lie, tiny, tmp_path):
    ends = pytest.raises(RunError, match="not drawn from the policy") if lie in ENDED else nullcontext()
    with ends:
        run(tiny, tmp_path / "run", lie)
    found = {check.name: check for check in next(iter(audit(tmp_path / "run").values()))}
    failed = {name: check for name, check in found.items() if check.verdict == "FAIL"}
    if lie is None:
        assert not failed
        assert found["sampling test"].verdict == found["trainer against sampler"].verdict == "pass"
    else:
        assert NAMED[lie] in failed


@pytest.mark.parametrize("lie", ["one_fewer", "one_more"])
def test_a_wrong_number_of_completions_ends_the_run(lie, tiny, tmp_path):
    with pytest.raises(RunError, match="completions for 128: 16 prompts with num_generations = 8"):
        run(tiny, tmp_path / "run", lie, max_training_steps=1)


def test_every_lie_changes_what_it_says():
    with pytest.raises(ValueError, match="no lie is called 'white': greedy"):
        lying_sampler("white")
    assert {*NAMED, "one_fewer", "one_more", "encoded_again"} == {*LIES}
