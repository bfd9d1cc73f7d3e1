"""The order of prompts over rollouts of one round or several, and how far through the epochs it is."""

import pytest

from rlhf_core import TrainerConfig
from rlhf_core.rollouts.updates import PromptOrder


@pytest.fixture
def order():
    """Two epochs over six prompts, two of them per round, two updates per rollout."""
    config = TrainerConfig(num_train_epochs=2, max_training_steps=1, shuffle_train_dataset=False)
    return PromptOrder(config, 6, prompts_per_rollout=2, updates_per_rollout=2, seed=3)


def test_rollouts_continue_after_the_rounds_of_earlier_ones(order):
    draw = order.next_prompts(0)
    assert [draw().tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    order.add_rounds(2)
    assert order.next_prompts(1)().tolist() == [4, 5]
    order.add_rounds(1)
    assert order.next_prompts(2)().tolist() == [0, 1]


def test_the_last_rollout_is_the_one_that_completes_the_epochs(order):
    assert [order.ends_with(number) for number in (4, 5)] == [False, True]
    order.add_rounds(3)
    assert [order.ends_with(number) for number in (2, 3)] == [False, True]


def test_epochs_count_the_rounds_of_a_rollout_over_its_updates(order):
    assert [order.epochs(step) for step in (1, 2, 3)] == pytest.approx([1 / 6, 1 / 3, 1 / 2])
    order.add_rounds(3)
    assert [order.epochs(step) for step in (1, 2)] == pytest.approx([1 / 2, 1])
    order.add_rounds(1)
    assert [order.epochs(step) for step in (3, 4)] == pytest.approx([7 / 6, 4 / 3])


def test_a_seed_of_zero_is_a_seed():
    def first(shuffle_seed_train, seed):
        config = TrainerConfig(shuffle_seed_train=shuffle_seed_train)
        order = PromptOrder(config, 100, prompts_per_rollout=9, updates_per_rollout=1, seed=seed)
        return order.next_prompts(0)().tolist()

    assert first(0, 3) == first(None, 0) != first(None, 3)
