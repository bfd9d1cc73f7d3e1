"""The GRPO config: flat names, defaults and round trips."""

from rlhf_grpo import GRPOConfig

from rlhf_core.sampling import SamplingOptions


def test_flat_names_expand():
    config = GRPOConfig(
        loss_type="grpo", epsilon=0.1, epsilon_high=0.3, delta=4.0, importance_sampling_level="sequence", beta=0.5,
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, max_completion_length=9, scale_rewards="batch",
    )  # fmt: skip
    assert config.loss.name == "grpo"
    assert config.loss.options == {
        "epsilon": 0.1, "epsilon_high": 0.3, "delta": 4.0, "importance_sampling_level": "sequence"
    }  # fmt: skip
    assert config.sampling == SamplingOptions(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, max_completion_length=9
    )
    assert (config.kl.beta, config.advantage.options) == (0.5, {"scale": "batch"})
    assert GRPOConfig.from_json(config.to_json()) == config
    assert GRPOConfig.from_dict(config.to_dict()) == config
    defaults = GRPOConfig()
    assert [defaults.epsilon, defaults.epsilon_high, defaults.delta, defaults.beta, defaults.temperature] == [
        0.2, 0.2, None, 0.04, 1.0
    ]  # fmt: skip


def test_evaluation_samples_as_training_does_but_for_what_it_says():
    config = GRPOConfig(
        temperature=0.9,
        max_completion_length=24,
        evaluation={"num_generations": 4, "sampling": {"temperature": 0.5}},
    )
    assert config.evaluation_sampling == SamplingOptions(temperature=0.5, max_completion_length=24)
    assert GRPOConfig.from_dict(config.to_dict()) == config
    assert GRPOConfig(top_k=3).evaluation_sampling == SamplingOptions(top_k=3)


def test_completions_have_at_most_as_many_tokens_as_an_int32_counts():
    assert GRPOConfig(max_completion_length=2**31 - 1).sampling.max_completion_length == 2**31 - 1
