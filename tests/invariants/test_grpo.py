"""Value and gradient of an update: those of the definitions, and the same however the update is laid out.

A pairwise covering set of the options on arrays, and four combinations through a model on one device and on eight. What
is not long has every value of every option.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rlhf_grpo import get_per_token_logps_and_entropies, grpo_step, policy_loss

from rlhf_core import create_state
from rlhf_core.mesh import make_mesh, put_rows
from rlhf_core.metrics import merge, results
from rlhf_core.models import fresh_model
from rlhf_core.packing import Layout
from rlhf_core.step import Accumulated, _accumulate, _gradients, _merge_losses, apply, count, loss_metrics
from tests.shared import update_cases as cases
from tests.shared import update_reference as reference

N, T, LENGTHS = cases.N, cases.T, cases.LENGTHS
COMBINATIONS = cases.covering()


def bring_values(combinations: list[dict[str, Any]]) -> list[int]:
    """The numbers of those with a value of an option that no earlier one has, where it acts."""
    brought: set[str] = set()
    found = []
    for number, chosen in enumerate(combinations):
        acting = [name for name in chosen if chosen.get(cases.NEEDS.get(name), True) is not None]
        values = {f"{name}={chosen[name]}" for name in acting}
        if values - brought:
            found.append(number)
        brought |= values
    return found


KEPT = bring_values(COMBINATIONS)
"""Of the combinations, which have every two values."""
ROWS = {"rows": (2,), "sequences": (4,), "trained": (26,)}  # all alike: an operation compiles once
LAYOUTS: dict[str, dict[str, Any]] = {
    "one micro-batch": {"layout": Layout((30,), **ROWS)},
    "micro-batches, one empty, reversed": {"layout": Layout((19,), **ROWS), "reverse": True, "spare": True},
    "a completion a row": {"layout": Layout((11,), **ROWS), "shared": False},
}


@pytest.fixture
def case(request):
    """On arrays: the tokens are their own numbers."""
    draw = np.random.default_rng(6)
    return cases.Case(
        COMBINATIONS[request.param],
        logps=-draw.exponential(1.0, (N, T)),
        entropies=draw.gamma(2.0, 0.5, (N, T)),
        tokens=np.arange(N * T).reshape(N, T),
        prompts=[np.full(3, N * T, np.int32)] * 3,
    )


def params_of(case: Any) -> dict[str, jax.Array]:
    return {name: jnp.asarray(case.data[name], jnp.float32) for name in ("logps", "entropies")}


def padded(case: Any) -> tuple[Any, dict[str, Any], Any]:
    """(value, metrics, gradients) of `policy_loss`."""
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in case.data.items()}

    def loss(params: Any) -> Any:
        return policy_loss(
            params["logps"],
            None if case.own else arrays["old"],
            arrays["advantages"][:, 0],
            arrays["mask"],
            ref_logps=arrays["ref"],
            entropies=params["entropies"],
            **case.options,
        )

    (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params_of(case))
    return value, metrics, grads


def packed(case: Any, layout: dict[str, Any]) -> tuple[Any, dict[str, Any], Any]:
    """(value, metrics, gradients) of the trainer's objective, sums of the micro-batches divided once."""
    compute, params, batches = case.objective(None), params_of(case), case.laid_out(**layout)
    every: dict[str, Any] = {}
    for batch in batches:
        loss, metrics = compute(params, batch)
        every = merge(every, {**metrics, **loss_metrics(loss)})
    counts = {name: metric.count for name, metric in every.items() if name.partition("/")[0] == "loss"}

    def total(params: Any) -> Any:
        losses = [loss_metrics(compute(params, batch)[0]) for batch in batches]
        return sum(
            mean.total / jnp.maximum(counts[name], 1) for each in losses for name, mean in each.items()
        )

    value, grads = jax.value_and_grad(total)(params)
    return value, results(every), grads


def assert_is(got: tuple[Any, dict[str, Any], Any], case: Any, options: Any, correction: Any) -> None:
    value, metrics, grads = got
    data = case.data
    expected = reference.update_loss(data["logps"], data["entropies"], data, options, correction)
    by_logps, by_entropies = reference.gradients(data, options, correction)
    assert float(value) == pytest.approx(float(expected), rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(grads["logps"], by_logps, rtol=1e-5, atol=2e-6 * np.abs(by_logps).max())
    np.testing.assert_allclose(grads["entropies"], by_entropies, rtol=1e-5, atol=1e-8)
    for name, number in reference.metrics(data, options).items():
        assert float(metrics[name]) == pytest.approx(number, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize(
    "case",
    [i if i in KEPT else pytest.param(i, marks=pytest.mark.long) for i in range(len(COMBINATIONS))],
    indirect=True,
)
def test_an_update_is_its_definition_however_it_is_laid_out(case, request, monkeypatch):
    """Padded, and in one of the layouts, which take turns."""
    assert_is(padded(case), case, case.options, None)
    monkeypatch.setattr("rlhf_grpo.objective.trained_logps", cases.looked_up)
    monkeypatch.setattr(jax, "jit", lambda function: function)  # what stands for a model looks values up
    options = {**case.options, "num_items": None}  # the trainer counts the tokens itself
    layout = list(LAYOUTS.values())[request.node.callspec.params["case"] % len(LAYOUTS)]
    got = packed(case, layout)
    assert_is(got, case, options, case.correction)
    for name, number in reference.sampler_metrics(case.data, case.correction).items():
        assert float(got[1][name]) == pytest.approx(number, rel=1e-5, abs=1e-6), name


FOUR: list[dict[str, Any]] = [
    {
        "loss_type": "gspo",
        "bounds": {"epsilon": 0.05, "epsilon_high": 0.1, "delta": 1.2},
        "kl": "k3",
        "use_bias_correction_kl": True,
    },
    {
        "loss_type": "cispo",
        "bounds": {"epsilon_high": 1.1},
        "top_entropy_quantile": 0.45,
        "mask": "truncated",
    },
    {
        "loss_type": "sapo",
        "bounds": {"sapo_temperature_pos": 0.7},
        "kl": "k2",
        "entropy_coef": 0.3,
        "correction": "mask",
        "correction_level": "sequence",
        "mask": "truncated",
    },
    {
        "loss_type": "dr_grpo",
        "bounds": {"epsilon": 0.1, "epsilon_high": 0.2, "dual_clip": 1.3},
        "importance_sampling_level": "sequence_token",
        "kl": "k1",
        "top_entropy_quantile": 0.6,
        "correction": "truncate",
        "mask": "holes",
        "old": "own",
    },
]
LAID_OUT: dict[str, dict[str, Any]] = {
    "1 device, a completion a row": {
        "devices": 1,
        "layout": Layout((13,), (6,), (1,), (8,)),
        "shared": False,
    },
    "8 devices, two micro-batches": {
        "devices": 8,
        "layout": Layout((21,), (4,), (2,), (13,)),
        "reverse": True,
        "spare": True,
    },
}
PROMPTS = [np.array(ids, np.int32) for ids in ([5, 9, 3], [11, 4, 7, 30, 8], [6])]


@cache
def model_on(tiny: Any, devices: int) -> Any:
    sizes = {1: {}, 8: {"data": 2, "fsdp": 2, "tensor": 2}}[devices]
    mesh = make_mesh(**sizes, devices=jax.devices()[:devices])
    sizes = {**tiny.SIZES, "num_hidden_layers": 1}
    model = fresh_model(sizes, "lm", tokenizer=tiny.make_tokenizer(), mesh=mesh, seed=1)
    return model.with_params(jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, model.params))


class Four:
    """The combinations with a model's own log-probabilities, and one update of each by the trainer's objective."""

    def __init__(self, tiny: Any) -> None:
        self.tiny = tiny
        tokens = np.random.default_rng(7).integers(3, 48, (N, T))
        width = max(map(len, PROMPTS))
        self.batch = {
            "prompt_ids": np.stack([np.pad(p, (width - len(p), 0)) for p in PROMPTS]),
            "prompt_mask": np.stack([np.arange(width) >= width - len(p) for p in PROMPTS]).astype(np.int32),
            "completion_ids": tokens,
        }
        ids = np.concatenate([np.repeat(self.batch["prompt_ids"], 2, 0), tokens], 1)
        mask = np.concatenate([np.repeat(self.batch["prompt_mask"], 2, 0), np.ones((N, T), np.int32)], 1)
        model = model_on(tiny, 1)
        logps, entropies = map(np.asarray, get_per_token_logps_and_entropies(model, ids, mask, width))
        default = {name: values[0] for name, values in cases.OPTIONS.items()}
        self.cases = [
            cases.Case(
                {**default, **chosen}, logps=logps, entropies=entropies, tokens=tokens, prompts=PROMPTS
            )
            for chosen in FOUR
        ]

    def updates(
        self, devices: int, cases: Any = None, **layout: Any
    ) -> list[tuple[dict[str, float], dict[str, np.ndarray]]]:
        """(metrics, parameters afterwards) for each case; cases: None: for all."""
        cases, model = cases or self.cases, model_on(self.tiny, devices)
        state = create_state(model, optax.sgd(0.1))
        objectives = [case.objective(model.definition) for case in cases]

        @jax.jit
        def count_each(params: Any, batches: Any) -> Any:
            return [count(o, params, b) for o, b in zip(objectives, batches, strict=True)]

        @jax.jit  # one program for all: most of it is the same
        def accumulate_each(params: Any, batches: Any, counts: Any) -> Any:
            steps = (partial(_gradients, o, frozenset()) for o in objectives)
            return [
                _accumulate(step, params, b, None, None, c)
                for step, b, c in zip(steps, batches, counts, strict=True)
            ]

        placed = [
            put_rows(model.mesh, list(batches))
            for batches in zip(*(case.laid_out(**layout) for case in cases), strict=True)
        ]
        counts = jax.tree.map(lambda *x: sum(x), *(count_each(state.params, batches) for batches in placed))
        # One program at a time: XLA on CPU can lock up where several of them wait for all devices.
        parts = [jax.block_until_ready(accumulate_each(state.params, batches, counts)) for batches in placed]
        update = jax.jit(lambda state, part: apply(state, whole(part)))
        return [numbers_of(update(state, part), self.tiny) for part in zip(*parts, strict=True)]


def whole(parts: Any) -> Accumulated:
    first, *others = parts
    for part in others:
        grads = jax.tree.map(jnp.add, first.grads, part.grads)
        losses = _merge_losses(first.loss, part.loss)
        first = Accumulated(grads, losses, merge(first.metrics, part.metrics))
    return first


def numbers_of(step: Any, tiny: Any) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    state, metrics = step
    return {name: float(x.result()) for name, x in metrics.items()}, tiny.leaves(jax.device_get(state.params))


@pytest.fixture(scope="module")
def four(tiny):
    return Four(tiny)


@pytest.fixture(scope="module")
def updated(four):
    """The first layout's updates, a completion a row."""
    return four.updates(**LAID_OUT["1 device, a completion a row"])


def assert_same(got: Any, expected: Any) -> None:
    assert got[0] == pytest.approx({name: expected[0][name] for name in got[0]}, rel=1e-5, abs=1e-6)
    assert expected[0]["grad_norm"] > 1e-2
    for name, leaf in expected[1].items():
        np.testing.assert_allclose(got[1][name], leaf, atol=3e-6, err_msg=name)


def test_the_loss_of_a_model_is_its_definition(four, updated):
    for case, (metrics, _) in zip(four.cases, updated, strict=True):
        data = case.data
        expected = reference.update_loss(
            data["logps"], data["entropies"], data, case.options, case.correction
        )
        assert metrics["loss"] == pytest.approx(float(expected), rel=2e-5)


@pytest.mark.parametrize("numbers", [(0, 3), pytest.param((1, 2), marks=pytest.mark.long)], ids=str)
def test_an_update_of_a_model_is_the_same_however_it_is_laid_out(four, updated, numbers):
    found = four.updates(cases=[four.cases[i] for i in numbers], **LAID_OUT["8 devices, two micro-batches"])
    for got, i in zip(found, numbers, strict=True):
        assert_same(got, updated[i])


def test_grpo_step_is_the_trainers_update(four, updated):
    """Of the combination whose entropy quantile is taken over all three splits."""
    number, devices, splits = 1, 8, 3
    case = four.cases[number]
    options = {name: x for name, x in case.options.items() if name not in ("kl", "entropy_coef")}
    batch = {
        **four.batch,
        "completion_mask": case.data["mask"],
        "advantages": case.data["advantages"][:, 0],
        "old_per_token_logps": case.data["old"],
        "ref_per_token_logps": case.data["ref"],
    }
    state = create_state(model_on(four.tiny, devices), optax.sgd(0.1))
    state, metrics = grpo_step(state, batch, num_generations=2, gradient_accumulation_steps=splits, **options)
    after = four.tiny.leaves(jax.device_get(state.params))
    assert_same(({name: float(x) for name, x in metrics.items()}, after), updated[number])
