"""Functions over arrays, called from Python with what they cannot compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import optax
from rlhf_distill import Head, token_divergences
from rlhf_dpo import DPO_LOSS, dpo_loss
from rlhf_dpo import evaluation_step as dpo_evaluation
from rlhf_dpo import training_step as dpo_update
from rlhf_grpo import compute_per_token_logps, group_advantages, grpo_step, policy_loss
from rlhf_reward import evaluation_step, pairwise_loss, training_step

from rlhf_core import LossOutput, Registry, create_state, load_model
from tests.mistakes.mistake import Mistake, call

ONES = np.ones((2, 3), np.float32)
PAIR = ("chosen", "rejected")


def of_groups(name: str, rewards: Any, **options: Any) -> Mistake:
    return call(f"group_advantages of {name}", lambda place: group_advantages(rewards, **options))


def of_policy(name: str, **options: Any) -> Mistake:
    return call(
        f"policy_loss with {name}", lambda place: policy_loss(ONES, None, ONES[:, 0], ONES, **options)
    )


def of_pairs(name: str, loss: Any) -> Mistake:
    return call(f"pairwise_loss with {name}", lambda place: pairwise_loss(ONES[:, 0], ONES[:, 0], loss=loss))


def of_references(name: str, loss: Any) -> Mistake:
    four = [ONES[:, 0]] * 4
    return call(f"dpo_loss with {name}", lambda place: dpo_loss(*four, loss_type=loss))


def logps_of(logits: tuple[int, ...], prompt: int) -> Mistake:
    ids = np.zeros((2, 7), np.int32)
    return call(
        f"compute_per_token_logps of logits {list(logits)} after {prompt} tokens",
        lambda place: compute_per_token_logps(np.zeros(logits, np.float32), ids, prompt),
    )


def padded(*parts: str, without: str = "", rows: int = 8) -> dict[str, Any]:
    """A batch of pairs, of ids, masks and other parts."""
    names = [f"{part}_{side}" for part in ("input_ids", "attention_mask", *parts) for side in PAIR]
    ones = {name: np.ones((rows, 3), np.int32) for name in names}
    references = {f"ref_logps_{side}": np.zeros(rows, np.float32) for side in PAIR} if parts else {}
    return {name: x for name, x in (ones | references).items() if name not in without.split()}


def completions(*without: str, prompts: int = 8) -> dict[str, Any]:
    ids, prompt = np.ones((8, 3), np.int32), np.ones((prompts, 2), np.int32)
    batch = {"prompt_ids": prompt, "prompt_mask": prompt, "completion_ids": ids, "completion_mask": ids}
    numbers = {"advantages": np.ones(8, np.float32), "ref_per_token_logps": np.zeros((8, 3), np.float32)}
    return {name: x for name, x in (batch | numbers).items() if name not in without}


def state(path: str = "model", head: Any = "lm") -> Any:
    return create_state(load_model(path, head), optax.sgd(1.0))


def diverge(name: str, student: Head, teacher: Head, **options: Any) -> Mistake:
    return call(
        f"token_divergences of {name}",
        lambda place: token_divergences(lambda s, t: s - t, student, teacher, **options),
    )


@dataclass
class Loose:
    """A loss that is not frozen."""

    weight: float = 1.0

    def __call__(self, inputs: Any) -> LossOutput:
        return LossOutput(-self.weight * inputs.ratio_chosen)


@dataclass(frozen=True)
class Unsure:
    """A loss that does not say whether it reads the reference."""

    reads_reference: ClassVar[str] = "no"

    def __call__(self, inputs: Any) -> LossOutput:
        return LossOutput(-inputs.logps_chosen)


HIDDEN, KERNEL, WIDE = np.ones((2, 3, 4)), np.ones((4, 5)), np.ones((6, 5))
ADVANTAGES = [
    of_groups("5 rewards, num_generations=2", np.ones(5), num_generations=2),
    of_groups("4 rewards, num_generations=1", np.ones(4), num_generations=1),
    of_groups("two functions, weights=[1.0]", np.ones((4, 2)), num_generations=2, weights=[1.0]),
    of_groups("two functions and three weights", np.ones((4, 2)), num_generations=2, weights=[1.0] * 3),
    of_groups("4 rewards, scale='std'", np.ones(4), num_generations=2, scale="std"),
]
POLICIES = [
    of_policy("beta=0.1, no reference", beta=0.1),
    of_policy("top_entropy_quantile=0.5, no entropies", top_entropy_quantile=0.5),
    of_policy("loss_type='dappo'", loss_type="dappo"),
    of_policy("importance_sampling_level='sequnce'", importance_sampling_level="sequnce"),
    logps_of((2, 5, 11), 3),
    logps_of((2, 7, 11), 0),
    logps_of((7, 11), 3),
    logps_of((1, 7, 11), 3),
    call("grpo_step without a reference", lambda place: grpo_step(None, completions("ref_per_token_logps"))),
    call("grpo_step without a mask", lambda place: grpo_step(None, completions("completion_mask"), beta=0.0)),
    call(
        "grpo_step of two prompts for 8 completions, num_generations=2",
        lambda place: grpo_step(None, completions(prompts=2), num_generations=2),
    ),
    call(
        "grpo_step of 8 completions, gradient_accumulation_steps=3",
        lambda place: grpo_step(state(), completions(), gradient_accumulation_steps=3),
    ),
]
PREFERENCES = [
    of_pairs("a smoothing of 0.5", {"name": "conservative", "label_smoothing": 0.5}),
    of_pairs("tau = 0", {"name": "squared", "tau": 0}),
    of_pairs("a margin of the hinge", {"name": "hinge", "margin": 1}),
    of_pairs("a table without a name", {"label_smoothing": 0.1}),
    of_pairs("loss='bradley_tery'", "bradley_tery"),
    call(
        "training_step of 8 pairs, gradient_accumulation_steps=3",
        lambda place: training_step(state("scorer", "score"), padded(), gradient_accumulation_steps=3),
    ),
    call(
        "evaluation_step without a mask",
        lambda place: evaluation_step(state("scorer", "score"), padded(without="attention_mask_rejected")),
    ),
    of_references("loss_type='sigmod'", "sigmod"),
    of_references("a smoothing of 0.5", {"name": "robust", "label_smoothing": 0.5}),
    of_references("smoothing=0.1", {"name": "sigmoid", "smoothing": 0.1}),
    call("registry.add(DPO_LOSS, …) of a class", lambda place: Registry().add(DPO_LOSS, "loose", Loose)),
    call(
        'registry.add(DPO_LOSS, …), reads_reference = "no"',
        lambda place: Registry().add(DPO_LOSS, "unsure", Unsure),
    ),
    call("dpo_loss without a reference", lambda place: dpo_loss(ONES[:, 0], ONES[:, 0])),
    call(
        "DPO's training_step of 8 pairs, gradient_accumulation_steps=3",
        lambda place: dpo_update(state(), padded("completion_mask"), gradient_accumulation_steps=3),
    ),
    call(
        "DPO's evaluation_step without two arrays",
        lambda place: dpo_evaluation(
            state(), padded("completion_mask", without="completion_mask_rejected ref_logps_chosen")
        ),
    ),
]
DIVERGENCES = [
    diverge("a kernel of another width", Head(HIDDEN, WIDE), Head(HIDDEN, KERNEL)),
    diverge("fewer rows of the teacher", Head(HIDDEN, KERNEL), Head(HIDDEN[:1], KERNEL)),
    diverge("top_k=0", Head(HIDDEN, KERNEL), Head(HIDDEN, KERNEL), top_k=0),
]
SECTIONS = {
    "Advantages from Python": ADVANTAGES,
    "Policy losses and updates from Python": POLICIES,
    "Losses and updates of pairs from Python": PREFERENCES,
    "Divergences from Python": DIVERGENCES,
}
