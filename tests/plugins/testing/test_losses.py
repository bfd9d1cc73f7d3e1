"""The kits for policy and pairwise losses find each defect, and only that; our losses have none."""

from __future__ import annotations

import dataclasses
import itertools
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_core import PAIRWISE_LOSS, POLICY_LOSS, LossOutput, PairInputs, PolicyInputs, plugins
from rlhf_core.errors import InputError
from rlhf_core.testing import check_pairwise_loss, check_policy_loss

CALLS = itertools.count()
Loss = Callable[[Any], Any]


def clipped(inputs: PolicyInputs) -> jax.Array:
    ratio = jnp.exp(inputs.logps - inputs.old_logps)
    return -jnp.minimum(ratio * inputs.advantages, jnp.clip(ratio, 0.8, 1.2) * inputs.advantages)


def difference(inputs: PairInputs) -> jax.Array:
    return inputs.chosen - inputs.rejected - inputs.margin


def logistic(inputs: PairInputs) -> jax.Array:
    return -jax.nn.log_sigmoid(difference(inputs))


class Kit(NamedTuple):
    """A kit with a good loss of its kind, and the difference that the loss is a function of.

    far: differences that are beyond any that occurs. kink: one that the kit tries.
    """

    check: Callable[..., None]
    good: Callable[[Any], jax.Array]
    difference: Callable[[Any], jax.Array]
    far: float
    kink: float


POLICY = Kit(check_policy_loss, clipped, lambda inputs: inputs.logps - inputs.old_logps, 30, 0.0)
PAIRS = Kit(check_pairwise_loss, logistic, difference, 1e3, 1e4)


def shared(kit: Kit) -> dict[str, tuple[str, Loss]]:
    """Defects of losses of any kind: {what is wrong: (the property that it breaks, the loss)}."""
    good = kit.good

    @dataclass
    class NotFrozen:
        def __call__(self, inputs: Any) -> LossOutput:
            return LossOutput(good(inputs))

    @dataclass(frozen=True, eq=False)
    class EqualToItselfOnly:
        def __call__(self, inputs: Any) -> LossOutput:
            return LossOutput(good(inputs))

    def infinite(inputs: Any) -> LossOutput:
        return LossOutput(jnp.where(jnp.abs(kit.difference(inputs)) > kit.far, jnp.inf, good(inputs)))

    def root_of_a_square(inputs: Any) -> LossOutput:
        return LossOutput(good(inputs) + 1e-6 * jnp.sqrt(jnp.square(kit.difference(inputs) - kit.kink)))

    def branching(inputs: Any) -> LossOutput:
        return LossOutput(good(inputs) if good(inputs).sum() < 1e9 else kit.difference(inputs))

    return {
        "not frozen": ("component", NotFrozen),
        "equal to itself only": ("hash", EqualToItselfOnly),
        "averaged": ("output", lambda inputs: LossOutput(good(inputs).mean())),
        "an array": ("output", good),
        "without metrics": ("output", lambda inputs: LossOutput(good(inputs), None)),  # type: ignore[arg-type]
        "half": ("dtype", lambda inputs: LossOutput(good(inputs).astype(jnp.bfloat16))),
        "an averaged metric": (
            "metrics",
            lambda inputs: LossOutput(good(inputs), {"x": good(inputs).mean()}),
        ),
        "noisy": ("repeatable", lambda inputs: LossOutput(good(inputs) * (1 + 3e-6 * (next(CALLS) % 2)))),
        "infinite far away": ("finite value", infinite),
        "the root of a square": ("finite gradient", root_of_a_square),
        "uphill": ("direction", lambda inputs: LossOutput(-good(inputs))),
        "branching": ("jit", branching),
    }


@dataclass(frozen=True)
class UnknownAggregation:
    aggregation: ClassVar[str] = "tokens"

    def __call__(self, inputs: PolicyInputs) -> LossOutput:
        return LossOutput(clipped(inputs))


def infinite_metric(inputs: PolicyInputs) -> LossOutput:
    return LossOutput(clipped(inputs), {"log": jnp.log(0.0 * inputs.logps)})


def sum_of_all_tokens(inputs: PolicyInputs) -> LossOutput:
    every = dataclasses.replace(inputs, mask=jnp.ones_like(inputs.mask))
    return LossOutput(clipped(inputs) * (1 + 0.01 * every.sequence_sum(inputs.old_logps)))


def by_the_width(inputs: PolicyInputs) -> LossOutput:
    return LossOutput(clipped(inputs) * (2.0 if inputs.mask.shape[1] % 7 else 1.0))


def centred_tokens(inputs: PolicyInputs) -> LossOutput:
    mask = inputs.mask
    mean = (jnp.where(mask != 0, inputs.advantages, 0) * mask).sum() / jnp.maximum(mask.sum(), 1)
    return LossOutput(clipped(dataclasses.replace(inputs, advantages=inputs.advantages - 0.1 * mean)))


def mean_of_the_row(inputs: PolicyInputs) -> LossOutput:
    mask, difference = inputs.mask, inputs.logps - inputs.old_logps
    total = jnp.where(mask != 0, difference, 0).sum(1, keepdims=True)
    ratio = jnp.exp(total / jnp.maximum(mask.sum(1, keepdims=True), 1)) * jnp.ones_like(mask)
    return LossOutput(-ratio * inputs.advantages)


def without_gradient(inputs: PolicyInputs) -> LossOutput:
    return LossOutput(-inputs.advantages)


def needs_a_reference(inputs: PolicyInputs) -> LossOutput:
    return LossOutput(clipped(inputs) + 0.01 * (inputs.logps - inputs.ref_logps))  # type: ignore[operator]


def centred_pairs(inputs: PairInputs) -> LossOutput:
    return LossOutput(logistic(inputs._replace(margin=inputs.margin + 0.1 * difference(inputs).mean())))


def order_matters(inputs: PairInputs) -> LossOutput:
    return LossOutput(logistic(inputs) * jnp.linspace(1.0, 2.0, len(inputs.chosen)))


def on_the_host(inputs: PairInputs) -> LossOutput:
    return LossOutput(jnp.asarray(np.logaddexp(0.0, -np.asarray(difference(inputs)))))


def as_a_number(inputs: PairInputs) -> LossOutput:
    return LossOutput(logistic(inputs) * float(inputs.margin.max() >= 0))


OF_POLICIES: list[tuple[str, Loss]] = [
    ("component", UnknownAggregation),
    ("metrics", infinite_metric),
    ("mask", sum_of_all_tokens),
    ("padding", by_the_width),
    ("rows", centred_tokens),
    ("packing", mean_of_the_row),
    ("direction", without_gradient),
    ("optional inputs", needs_a_reference),
]
OF_PAIRS: list[tuple[str, Loss]] = [
    ("pairs", centred_pairs),
    ("pairs", order_matters),
    ("jit", on_the_host),
    ("jit", as_a_number),
]
MUTANTS = [
    *(pytest.param(kit, *each, id=f"{of}, {what}") for of, kit in (("policy", POLICY), ("pairs", PAIRS))
      for what, each in shared(kit).items()),
    *(pytest.param(POLICY, *each, id=each[1].__name__) for each in OF_POLICIES),
    *(pytest.param(PAIRS, *each, id=each[1].__name__) for each in OF_PAIRS),
]  # fmt: skip


@pytest.mark.parametrize(("kit", "name", "loss"), MUTANTS)
def test_the_defect_is_found(kit: Kit, name: str, loss: Loss, failures: Any) -> None:
    assert set(found := failures(kit.check, loss)) == {name}, found


def test_several_defects_are_reported_at_once(failures: Any) -> None:
    found = failures(
        check_policy_loss, lambda inputs: LossOutput(-mean_of_the_row(inputs).loss.astype(jnp.bfloat16))
    )
    assert set(found) == {"dtype", "packing", "direction"}


def test_what_is_said_has_numbers_and_a_way_out(failures: Any) -> None:
    mutants = shared(POLICY)
    said = failures(check_policy_loss, mutants["half"][1])["dtype"]
    assert said.startswith("the loss is bfloat16; return float32\n")
    said = failures(check_policy_loss, mean_of_the_row)["packing"]
    assert "2 of 2 values change by up to " in said
    assert "inputs.sequence_mean" in said
    said = failures(check_policy_loss, mutants["branching"][1])["jit"]
    assert "TracerBoolConversionError" in said
    assert f"{__file__.rpartition('/')[2]} line " in said


@pytest.mark.parametrize(
    ("check", "loss", "name", "size"),
    [
        pytest.param(check_policy_loss, mean_of_the_row, "packing", 2, id="of a token each of two sequences"),
        pytest.param(check_policy_loss, centred_tokens, "rows", 2, id="of two rows"),
        pytest.param(check_pairwise_loss, centred_pairs, "pairs", 2, id="of two pairs"),
    ],
)
def test_what_is_shown_can_be_pasted(
    check: Callable[..., None], loss: Loss, name: str, size: int, failures: Any
) -> None:
    """The smallest inputs that fail, what they were changed to, and the loss of these."""
    said, _, imports = failures(check, loss)[name].partition("\nTo paste a line into Python, type first: ")
    python: dict[str, Any] = {}
    exec(imports, python)
    exec(textwrap.dedent(said.partition("\n")[2]), python)
    assert loss(python["inputs"]).loss.size == size
    found, again = np.ravel(python["found"]), np.ravel(loss(python["changed"]).loss)
    assert np.isin(found.round(5), again.round(5)).all()
    assert not np.isin(python["expected"].round(5), again.round(5)).all()


def test_an_input_error_may_ask_for_an_option(failures: Any) -> None:
    def asks(inputs: PolicyInputs) -> LossOutput:
        if inputs.ref_logps is None:
            raise InputError("this loss needs a reference: give kl.beta")
        return needs_a_reference(inputs)

    assert failures(check_policy_loss, asks) == {}


OURS = [
    *((POLICY_LOSS, name, {}) for name in plugins.load().registry.names(POLICY_LOSS)),
    (POLICY_LOSS, "dapo", {"importance_sampling_level": "sequence"}),
    (POLICY_LOSS, "dapo", {"delta": 2.0, "dual_clip": 3.0}),
    *((PAIRWISE_LOSS, name, {}) for name in plugins.load().registry.names(PAIRWISE_LOSS)),
]


@pytest.mark.parametrize(("kind", "name", "options"), OURS, ids=str)
def test_built_in_components_pass(kind: Any, name: str, options: dict[str, Any]) -> None:
    check = check_policy_loss if kind is POLICY_LOSS else check_pairwise_loss
    check(plugins.load().registry.get(kind, name, **options))
