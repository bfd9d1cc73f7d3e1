"""Settings without effect are told, those that can are not."""

import pytest
from rlhf_grpo import GRPOConfig
from rlhf_grpo.config_warnings import grpo_warnings

from rlhf_core import POLICY_LOSS, installed_registry

TWICE = {"num_iterations": 2}
CASES = [
    ({"epsilon": 0.3}, "loss.epsilon: has no effect", TWICE),
    ({"delta": 4.0}, "loss.delta: has no effect", TWICE),
    ({"loss_type": "sapo", "sapo_temperature_neg": 2.0}, "loss.temperature_neg: has no effect", TWICE),
    ({"importance_sampling_level": "sequence"}, "loss.importance_sampling_level: has no effect", TWICE),
    (
        {"importance_sampling_level": "sequence_token", "beta": 0.1},
        "loss.importance_sampling_level: has no effect",
        {"use_bias_correction_kl": True},
    ),
    (
        {"importance_sampling_level": "sequence", "top_entropy_quantile": 0.2},
        "every token of a sequence is trained if one of them is chosen",
        {"importance_sampling_level": "sequence_token"},
    ),
    (
        {"loss_type": "gspo", "top_entropy_quantile": 0.2, **TWICE},
        "every token of a sequence is trained if one of them is chosen",
        {"loss_type": "gspo_token"},
    ),
    ({"delta": 1.1, **TWICE}, "loss.delta=1.1: not above 1 + epsilon_high = 1.2", {"delta": 4.0}),
    ({"dual_clip": 0.5, **TWICE}, "loss.dual_clip=0.5: must be above 1", {"dual_clip": 3.0}),
    ({"loss_type": "cispo"}, "loss.epsilon_high=0.2: for cispo it is the cap", {"epsilon_high": 5.0}),
    ({"loss_type": "gspo", **TWICE}, "the GSPO paper uses 3e-4", {"epsilon": 3e-4, "epsilon_high": 4e-4}),
    ({"importance_sampling_level": "sequence", **TWICE}, "the GSPO paper uses 3e-4", {"epsilon": 3e-4}),
    ({"sync_ref_model": True, "beta": 0.0}, "sync_ref_model: has no effect", {"beta": 0.1}),
    ({"sync_ref_model": True, "ref_model_sync_steps": 64}, "the run has 10", {"ref_model_sync_steps": 5}),
    ({"use_bias_correction_kl": True, "beta": 0.0}, "use_bias_correction_kl: has no effect", {"beta": 0.1}),
    (
        {"kl": {"name": "k1", "beta": 0.1}},
        "its gradient is zero on average",
        {"use_bias_correction_kl": True},
    ),
    ({"epsilon": 0.1, **TWICE}, "loss.epsilon=0.1 without epsilon_high", {"epsilon_high": 0.1}),
    ({"kl": {"place": "reward"}}, "differ by KL alone", {"scale_rewards": "none"}),
    (
        {"kl": {"place": "reward"}, "advantage": {"name": "normalize_then_sum"}},
        "kl.place='reward': has no effect",
        {"advantage": {"name": "rloo"}},
    ),
    (
        {"dynamic_sampling": {}, "scheduler": "linear"},
        "the run may end before the learning rate has reached its final value",
        {"max_training_steps": 5},
    ),
    ({"top_p": 0.9}, "sampling.top_p=0.9: completions come from a filtered", {"top_p": 1.0}),
    ({"top_k": 5, "sampler_correction": {}}, "does not correct for the filter", {"top_k": None}),
    ({"rewards": [{"name": "length", "weight": 0.0}]}, "weight is 0", {"rewards": ["length"]}),
    ({"num_completions_to_print": 9}, "has no effect without log_completions", {"log_completions": True}),
    (
        {"rewards": [{"name": "soft_overlong", "max_length": 40, "cache": 5}], "max_completion_length": 30},
        "rewards 'soft_overlong': has no effect: it begins above 35",
        {"max_completion_length": 38},
    ),
]


def told(options):
    config = GRPOConfig(**{"max_completion_length": 40, **options})
    registry = installed_registry()
    named = config.loss.name in registry.names(POLICY_LOSS)
    loss = registry.get(POLICY_LOSS, config.loss.name, **config.loss.options) if named else tanh
    return "\n".join(grpo_warnings(config, loss, updates=10))


def tanh(inputs):
    """A loss of another package."""


@pytest.mark.parametrize(("options", "expected", "cure"), CASES, ids=[c[1] for c in CASES])
def test_each_warning_lasts_until_its_setting_is_fixed(options, expected, cure):
    assert expected in told(options)
    assert expected not in told({**options, **cure})


def test_defaults_and_sound_configs_give_no_warning():
    assert told({}) == ""
    assert told({**TWICE, "epsilon": 0.2, "epsilon_high": 0.28, "delta": 4.0}) == ""


def test_options_of_plugin_losses_give_no_warning():
    for changes in ({}, TWICE):
        assert told({"loss": {"name": "gentle", "epsilon": 0.1, "delta": 1.0}, **changes}) == ""


@pytest.mark.parametrize("name", ["rloo", "reinforce_pp"])
def test_advantages_without_a_deviation_of_the_group_hear_nothing_of_its_scale(name):
    assert told({"kl": {"place": "reward"}, "advantage": {"name": name}}) == ""


def test_a_weight_of_0_is_reported_by_the_weights_that_count():
    def rewards(*weights, **options):
        named = [{"name": "length", "label": f"r{i}", "weight": w} for i, w in enumerate(weights)]
        return told({"rewards": named, **options})

    assert "rewards 'r1': weight is 0" in rewards(1.0, 0.0)
    assert rewards(1.0, 0.0, reward_weights=[1.0, 2.0]) == ""
    assert "rewards 'r0': weight is 0" in rewards(1.0, 1.0, reward_weights=[0.0, 1.0])
    # An advantage of a stranger may read the functions one by one.
    assert rewards(1.0, 0.0, advantage={"name": "mine"}) == ""
