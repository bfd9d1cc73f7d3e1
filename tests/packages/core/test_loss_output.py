"""A loss that raises, or does not return one value per element, gives a one-line error."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_core import LossOutput
from rlhf_core.errors import InputError
from rlhf_core.objective import loss_output


def misspelt(inputs):
    return LossOutput(inputs.logprobs)


def branching(inputs):
    return LossOutput(inputs if inputs.sum() > 0 else -inputs)


def asks_for_more(inputs):
    raise InputError("ref_logps: missing; set kl.beta")


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (misspelt, r"policy loss 'mine' raised AttributeError: .*\(.*test_loss_output.py line 16\)$"),
        (
            branching,
            r"policy loss 'mine' uses a traced value .*\(TracerBoolConversionError\).*_output.py line 20\)$",
        ),
        (
            lambda inputs: -inputs,
            r"policy loss 'mine' returned an array; expected LossOutput\(loss, metrics",
        ),
        (lambda inputs: None, "policy loss 'mine' returned NoneType; expected LossOutput"),
        (
            lambda inputs: LossOutput(inputs.mean()),
            r"array of shape \[\]; expected one number per token, \[2, 3\]",
        ),
        (
            lambda inputs: LossOutput(inputs, {"spread": inputs.std()}),
            r"returned metric 'spread' of shape \[\]; expected one number per token, \[2, 3\]",
        ),
        (
            lambda inputs: LossOutput(inputs, {"spread": 1.0}),
            r"returned float as metric 'spread'; expected one number per token, \[2, 3\]",
        ),
        (
            lambda inputs: LossOutput(inputs, [inputs]),
            "returned metrics of type list; expected a dict of names and arrays",
        ),
        (asks_for_more, "^ref_logps: missing; set kl.beta$"),
    ],
)
def test_what_is_no_loss(loss, message):
    def step(inputs):
        what = "policy loss 'mine'"
        return loss_output(loss, inputs, inputs.shape, what=what, element="token", caller="nowhere/x.py").loss

    with pytest.raises(InputError) as caught:
        jax.jit(step)(jnp.ones((2, 3)))
    assert re.search(message, str(caught.value))
    assert "\n" not in str(caught.value)


def test_what_is_one():
    out = loss_output(
        lambda x: LossOutput(-x, {"size": np.ones(3)}),
        jnp.ones(3),
        (3,),
        what="pairwise loss 'mine'",
        element="pair",
        caller="nowhere/x.py",
    )
    np.testing.assert_array_equal(out.loss, -np.ones(3))
