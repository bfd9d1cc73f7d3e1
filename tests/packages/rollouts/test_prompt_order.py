"""The order of prompts over rollouts of one round or several, and how far through the epochs it is."""

import pytest

from rlhf_core import TrainerConfig
from rlhf_core.rollouts.prompt_order import PromptOrder


@pytest.fixture
def order():
    """Two epochs over six prompts, two of them per round, two updates per rollout."""
    config = TrainerConfig(num_train_epochs=2, max_training_steps=1, shuffle_train_dataset=False)
    return PromptOrder(config, 6, prompts_per_rollout=2, updates_per_rollout=2, seed=3)


def test_rollouts_continue_after_the_rounds_of_earlier_ones(order):
    first = order.reserve(3)
    assert [order.prompts(number).tolist() for number in first[:2]] == [[0, 1], [2, 3]]
    order.settle(first, 2)
    assert order.prompts(order.reserve(1)[0]).tolist() == [4, 5]
    assert order.prompts(order.reserve(1)[0]).tolist() == [0, 1]

    def first(shuffle_seed_train, seed):
        config = TrainerConfig(shuffle_seed_train=shuffle_seed_train)
        order = PromptOrder(config, 100, prompts_per_rollout=9, updates_per_rollout=1, seed=seed)
        return order.prompts(0).tolist()

    assert first(0, 3) == first(None, 0) != first(None, 3)


def test_what_was_given_back_is_reserved_first_in_its_order(order):
    """Three rollouts of up to three rounds are sampled before the first is trained on."""
    taken = [order.reserve(3) for _ in range(3)]
    assert taken == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    order.settle(taken[1], 1)
    order.settle(taken[0], 2)
    assert order.reserve(4) == [2, 4, 5, 9]


def test_the_epochs_end_with_their_last_round(order):
    seen = []
    for _ in range(6):
        taken = order.reserve(3)
        order.settle(taken, 1)
        seen.append((taken[0], order.exhausted))
    assert seen == [(n, n == 5) for n in range(6)]


def test_epochs_count_the_rounds_of_a_rollout_over_its_updates(order):
    assert [order.epochs(step) for step in (1, 2, 3)] == pytest.approx([1 / 6, 1 / 3, 1 / 2])
    order.settle(order.reserve(3), 3)
    assert [order.epochs(step) for step in (1, 2)] == pytest.approx([1 / 2, 1])
    order.settle(order.reserve(1), 1)
    assert [order.epochs(step) for step in (3, 4)] == pytest.approx([7 / 6, 4 / 3])
