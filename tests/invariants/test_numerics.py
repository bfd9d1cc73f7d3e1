"""Loss and gradient of every trainer: equal to float64 NumPy, and to themselves however an update is laid out.

Those of GRPO: test_grpo.py.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlhf_distill import DIVERGENCE, DistillConfig
from rlhf_distill.objective import objective as distill_objective
from rlhf_dpo import DPO_LOSS
from rlhf_dpo import objective as dpo
from rlhf_reward import objective as reward
from rlhf_sft.train import objective as sft_objective

from rlhf_core import PAIRWISE_LOSS, installed_registry
from rlhf_core.mesh import make_mesh, put_rows
from rlhf_core.models import Definition
from rlhf_core.packing import Layout, Tree, pack, tree
from rlhf_core.step import accumulate
from tests.shared import reference
from tests.shared.decoder_configs import defined
from tests.shared.reference import CONFIG

ONE = Layout((64,), (20,), (16,), (64,))  # everything in one micro-batch
TWO = Layout((48,), (4,), (6,), (48,))
SHORT = Layout((32, 64), (3, 2), (4, 8), (32, 64))  # several classes and micro-batches


def definition(head: str) -> Definition:
    return defined(CONFIG, head)


@cache
def weights(head: str) -> dict:
    """Larger than at initialisation, so that every term of the gradient is far from zero. On the host."""
    params = jax.device_get(definition(head).init(jax.random.key(7)))
    return jax.tree.map(lambda x: x * np.float32(4) if x.ndim > 2 or x.shape[0] > 2 else x, params)


def sequences(rng: np.random.Generator, n: int, low: int, high: int) -> list[np.ndarray]:
    return [rng.integers(1, 48, rng.integers(low, high)).astype(np.int32) for _ in range(n)]


class SFT:
    """Texts of which some tokens are not trained."""

    names: ClassVar[dict] = {"token_names": (), "sequence_names": ()}
    group = 1

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.texts = [(t, (rng.random(len(t)) < 0.7).astype(np.float32)) for t in sequences(rng, 20, 6, 30)]
        self.head, self.model = "lm", definition("lm")
        self.objective = partial(sft_objective, self.model)

    def trees(self, shared: bool) -> list[Tree]:
        return [tree([t], [w]) for t, w in self.texts]

    def expected(self, params: dict) -> float:
        return reference.sft_loss(params, CONFIG, self.texts)


class Reward:
    """Pairs with a common prompt and a margin."""

    names: ClassVar[dict] = {"token_names": (), "sequence_names": ("margin",)}
    group = 2

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        prompts = sequences(rng, 16, 3, 12)
        sides = [
            [np.concatenate([p, s]) for p, s in zip(prompts, sequences(rng, 16, 1, 9), strict=True)]
            for _ in "cr"
        ]
        self.pairs = list(zip(*sides, rng.random(16).astype(np.float32), strict=True))
        self.head, self.model = "score", definition("score")
        loss = installed_registry().get(PAIRWISE_LOSS, "bradley_terry")
        measure = partial(reward.pair_loss, loss, coefficient=0.1, name="bradley_terry")
        self.objective = partial(reward.objective, self.model, measure)

    def trees(self, shared: bool) -> list[Tree]:
        margins = [{"margin": np.full(2, m, np.float32)} for _, _, m in self.pairs]
        if shared:
            return [tree([c, r], sequence_values=m) for (c, r, _), m in zip(self.pairs, margins, strict=True)]
        nothing = np.zeros(0, np.int32)
        return [
            Tree(nothing, (c, r), sequence_values=m) for (c, r, _), m in zip(self.pairs, margins, strict=True)
        ]

    def expected(self, params: dict) -> float:
        return reference.reward_loss(params, CONFIG, self.pairs, 0.1)


class DPO:
    """Pairs of completions of a prompt, some of which begin alike, and their log-probabilities under a reference."""

    group = 2
    beta = 0.2

    def __init__(self, loss: str) -> None:
        self.head, self.model, self.loss = "lm", definition("lm"), loss
        self.names = {
            "token_names": (),
            "sequence_names": ("tokens",) if loss == "orpo" else ("reference", "tokens"),
        }
        measure = partial(dpo.pair_loss, installed_registry().get(DPO_LOSS, loss), name=loss)
        self.objective = partial(dpo.objective, self.model, measure, beta=self.beta)
        rng, own = np.random.default_rng(1), reference.as_float64(weights("lm"))
        self.pairs = []
        for i in range(16):
            prompt, alike = rng.integers(1, 48, rng.integers(1, 9)), rng.integers(1, 48, i % 3)
            sides = [
                np.concatenate([prompt, alike, rng.integers(1, 48, rng.integers(1, 8))]).astype(np.int32)
                for _ in "cr"
            ]
            near = [
                reference.logps(own, CONFIG, ids)[len(prompt) - 1 :].sum() + rng.normal() for ids in sides
            ]
            self.pairs.append((len(prompt), sides, np.array(near, np.float32)))

    def trees(self, shared: bool) -> list[Tree]:
        out = []
        for start, sides, near in self.pairs:
            trained = [(np.arange(len(ids)) >= start).astype(np.float32) for ids in sides]
            counts = np.array([w.sum() for w in trained], np.float32)
            values = {"reference": near, "tokens": counts}
            if shared:
                out.append(tree(sides, trained, sequence_values=values))
            else:
                out.append(Tree(np.zeros(0, np.int32), tuple(sides), tuple(trained), {}, values))
        return out

    def expected(self, params: dict) -> float:
        return float(np.mean([self.of_pair(params, *pair) for pair in self.pairs]))

    def of_pair(self, params: dict, start: int, sides: list[np.ndarray], near: np.ndarray) -> float:
        logps = [reference.logps(params, CONFIG, ids)[start - 1 :] for ids in sides]
        if self.loss == "orpo":
            means = [each.mean() for each in logps]
            chosen, rejected = (mean - np.log(-np.expm1(mean)) for mean in means)
            return float(-means[0] + 0.1 * np.logaddexp(0, rejected - chosen))
        ratios = [each.sum() - float(ref) for each, ref in zip(logps, near, strict=True)]
        if self.loss == "sigmoid":
            return float(np.logaddexp(0, -self.beta * (ratios[0] - ratios[1])))
        a, b = (ratio / len(each) for ratio, each in zip(ratios, logps, strict=True))
        return float((a - b - 1 / (2 * self.beta)) ** 2)


class Distill:
    """Prompts with one or two completions, of which some tokens are not trained, and a teacher with fewer layers."""

    names: ClassVar[dict] = {"token_names": (), "sequence_names": ()}
    group = 1
    temperature, beta = 1.5, 0.25

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        self.head, self.model = "lm", definition("lm")
        self.teacher_config = {**CONFIG, "num_hidden_layers": 1, "rope_theta": 100.0}
        layers = jax.tree.map(lambda x: x[:1], weights("lm")["layers"])
        self.teacher = {**weights("lm"), "layers": layers}
        divergence = installed_registry().get(DIVERGENCE, "jsd", beta=self.beta)
        models = {"policy": self.model, "teacher": defined(self.teacher_config, "lm")}
        self.compute = distill_objective(models, divergence, DistillConfig(temperature=self.temperature))
        self.examples = []
        for branches in (1, 1, 2, 2) * 4:
            written = sequences(rng, branches, 2, 7)
            masks = [(rng.random(len(ids)) < 0.7).astype(np.float32) for ids in written]
            for mask in masks:
                mask[0] = 1.0
            (prompt,) = sequences(rng, 1, 2, 6)
            self.examples.append((prompt, written, masks))

    def objective(self, params: Any, batch: Any) -> Any:
        return self.compute({"policy": params, "teacher": jax.tree.map(jnp.asarray, self.teacher)}, batch)

    def trees(self, shared: bool) -> list[Tree]:
        if shared:
            return [Tree(prompt, tuple(written), tuple(masks)) for prompt, written, masks in self.examples]
        return [
            Tree(prompt, (ids,), (mask,))
            for prompt, written, masks in self.examples
            for ids, mask in zip(written, masks, strict=True)
        ]

    def expected(self, params: dict) -> float:
        teacher = reference.as_float64(self.teacher)
        total = count = 0.0
        for prompt, written, masks in self.examples:
            for ids, mask in zip(written, masks, strict=True):
                s = self.predicted(params, CONFIG, prompt, ids)
                t = self.predicted(teacher, self.teacher_config, prompt, ids)
                m = self.beta * t + (1 - self.beta) * s
                terms = self.beta * t * np.log(t / m) + (1 - self.beta) * s * np.log(s / m)
                total += float((terms.sum(-1) * mask).sum())
                count += float(mask.sum())
        return total / count

    def predicted(self, params: dict, config: dict, prompt: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Compute the probabilities of every id before each of a completion's tokens, [tokens, ids]."""
        states = reference.hidden(params, config, np.concatenate([prompt, ids]))[len(prompt) - 1 : -1]
        odds = np.exp(states @ params["lm_head"]["kernel"] / self.temperature)
        return odds / odds.sum(-1, keepdims=True)


CASES = {
    "sft": SFT,
    "reward": Reward,
    "dpo ipo": partial(DPO, "ipo"),
    "dpo orpo": partial(DPO, "orpo"),
    "dpo sigmoid": partial(DPO, "sigmoid"),
    "distill": Distill,
}
LONG = [pytest.param(name, marks=pytest.mark.long) if name == "dpo sigmoid" else name for name in CASES]


VARIANTS = {
    "packed otherwise, reversed": {"layout": SHORT, "reverse": True},
    "8 devices, unshared, reversed": {"layout": TWO, "devices": 8, "shared": False, "reverse": True},
}


@cache
def made(name):
    return CASES[name]()


@pytest.fixture(params=LONG)
def case(request):
    return made(request.param)


def gradient(case, layout: Layout, *, shared: bool = True, devices: int = 1, reverse: bool = False):
    """(loss, mean gradient) of one update laid out in a certain way."""
    sizes = {1: {}, 8: {"data": 2, "fsdp": 2, "tensor": 2}}[devices]
    mesh = make_mesh(**sizes, devices=jax.devices()[:devices])
    params = jax.device_put(weights(case.head), case.model.shardings(mesh))
    trees = case.trees(shared)
    batches = pack(trees[::-1] if reverse else trees, layout, group=case.group, **case.names)
    done = None
    step = jax.jit(lambda p, b, before: accumulate(case.objective, p, b, before))
    for batch in batches:
        done = step(params, put_rows(mesh, batch), done)
    mean = jax.tree.map(lambda g: np.asarray(g) / float(done.loss.count), done.grads)
    return float(done.loss.result()), mean


@cache
def whole(case):
    """(loss, mean gradient) in one micro-batch."""
    return gradient(case, ONE)


def test_value_and_gradient_equal_float64(case):
    loss, grads = whole(case)
    params = reference.as_float64(weights(case.head))
    assert loss == pytest.approx(case.expected(params), rel=2e-5)
    rng = np.random.default_rng(11)
    size = np.sqrt(reference.inner(grads, reference.as_float64(grads)))
    for _ in range(3):
        direction = reference.random_direction(params, rng)
        up, down = (case.expected(reference.move(params, direction, h)) for h in (1e-6, -1e-6))
        slope = (up - down) / 2e-6
        assert reference.inner(grads, direction) == pytest.approx(slope, abs=2e-4 * size)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_layout_of_an_update_changes_nothing(case, variant):
    loss, grads = whole(case)
    other, others = gradient(case, **VARIANTS[variant])
    assert other == pytest.approx(loss, rel=3e-6)
    size = np.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(grads)))
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-6 * size)


def test_the_variants_have_several_micro_batches(case):
    counts = [
        len(pack(case.trees(shared), layout, group=case.group, **case.names))
        for layout, shared in ((ONE, True), (SHORT, True), (TWO, False))
    ]
    assert counts[0] == 1
    assert min(counts[1:]) > 1
