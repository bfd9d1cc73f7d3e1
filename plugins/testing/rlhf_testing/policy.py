"""Check policy losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from rlhf_core.contracts import POLICY_LOSS, PolicyInputs
from rlhf_core.errors import InputError
from rlhf_testing.findings import Broken, Findings, require_close
from rlhf_testing.loss import LossKind, Measured, check_loss

FIELDS = ("logps", "old_logps", "advantages", "ref_logps", "entropies", "rewards")
LENGTHS = (7, 5, 1, 3)
EXTREME = 40.0
"""Nats between policy and old policy: a ratio of 2e17, whose square float32 still holds."""
WINDOWS = ((1, 1), (1, 2), (2, 1), (2, 2), (1, 3))
"""(rows, tokens) of the parts of inputs in which a failure is looked for, the smallest first."""


def check_policy_loss(loss: Any) -> None:
    """Raise AssertionError that lists every property that the policy loss breaks.

    loss: the registered frozen dataclass or function, or an object of it with other options.

    component: it can be registered, and its attributes (`aggregation`, `importance_sampling_level`) are known.
    hash: objects with equal options are equal.
    output: a LossOutput with one value per token. dtype: float32. metrics: arrays of the same shape, finite.
    repeatable: a second call gives the same. jit: it compiles, with the same values.
    finite value, finite gradient: also at log-ratios of ±40 nats, advantages of 0, one token, an empty mask.
    mask: values outside it, even NaN, change nothing inside.
    padding: more unused tokens and rows change nothing.
    rows: a row does not depend on other rows or their order.
    packing: several sequences in one row give the same as in rows of their own.
    direction: at ratio 1 a step downhill favours tokens with a positive advantage.
    optional inputs: `ref_logps`, `entropies` and `rewards` may be None, or an InputError says that the loss needs them.
    """
    __tracebackhide__ = True
    findings = Findings("policy loss", loss)
    base = example()
    loss, run = check_loss(findings, TOKENS, loss, base, cases(base))
    for name, require in LAYOUTS.items():
        findings.check(name, partial(require, run), base, smaller(base))
    sampled = dataclasses.replace(base, old_logps=base.logps)
    findings.check("direction", partial(_require_direction, run), sampled, smaller(sampled))
    for absent in ("ref_logps", "entropies", "rewards"):
        require = partial(_require_optional, loss, absent)
        findings.check("optional inputs", require, base, smaller(base))
    findings.end()


def example() -> PolicyInputs:
    """Make four sequences of up to seven tokens with a hole in the mask; float32, no special values."""
    draw = np.random.default_rng(0)
    shape = (len(LENGTHS), max(LENGTHS))
    logps = -draw.exponential(1.0, shape)
    mask = np.arange(shape[1]) < np.array(LENGTHS)[:, None]
    mask[0, 2] = False
    arrays: dict[str, Any] = {
        "logps": logps,
        "old_logps": logps + 0.3 * draw.normal(size=shape),
        "advantages": np.repeat([[1.3], [-0.7], [0.4], [-1.1]], shape[1], axis=1),
        "mask": mask,
        "ref_logps": logps + 0.2 * draw.normal(size=shape),
        "entropies": draw.exponential(1.0, shape),
        "rewards": np.repeat([[1.5], [0.2], [1.0], [0.0]], shape[1], axis=1),
    }
    # Two decimals, so that inputs are short where they are shown.
    arrays = {name: jnp.asarray(np.round(np.asarray(x, float), 2), jnp.float32) for name, x in arrays.items()}
    return PolicyInputs(**arrays)


def smaller(inputs: PolicyInputs) -> Iterator[PolicyInputs]:
    """Yield the parts of inputs that `WINDOWS` lists, each of which has a token in its mask."""
    arrays = {name: np.asarray(x) for name, x in _arrays(inputs).items()}
    for rows, tokens in WINDOWS:
        for start in range(len(arrays["mask"]) - rows + 1):
            part: dict[str, Any] = {
                name: jnp.asarray(x[start : start + rows, :tokens]) for name, x in arrays.items()
            }
            if part["mask"].any():
                yield PolicyInputs(**part)


def cases(base: PolicyInputs) -> dict[str, PolicyInputs]:
    """Return inputs at which value and gradient must be finite: {words for messages: inputs}."""
    shape = base.logps.shape
    sign = np.where(np.indices(shape).sum(0) % 2, 1.0, -1.0).astype(np.float32)
    one = {name: x[:1, :1] for name, x in _arrays(base).items()}
    return {
        "ordinary values": base,
        f"log-ratios of ±{EXTREME:g} nats": dataclasses.replace(base, old_logps=base.logps - EXTREME * sign),
        "the policy that sampled": dataclasses.replace(base, old_logps=base.logps, ref_logps=base.logps),
        "advantages of 0": dataclasses.replace(base, advantages=jnp.zeros(shape)),
        "one token": PolicyInputs(**one),
        "an empty mask": dataclasses.replace(base, mask=jnp.zeros(shape)),
    }


def _require_same(
    run: Measured, inputs: PolicyInputs, changed: PolicyInputs, what: str, where: Any, rows: Any = slice(None)
) -> None:
    """Raise Broken unless the loss of the changed inputs equals that of `inputs`, value and gradient.

    where: bool, the tokens of `changed` that were there before. rows: the rows of `inputs` that they are of.
    """
    used = _used(inputs)[rows]
    for name, x, y in zip(("value", "gradient"), run(changed), run(inputs), strict=True):
        require_close(x[where], y[rows][used], f"{what}, {name}", changed=changed)


def _require_mask(run: Measured, inputs: PolicyInputs) -> None:
    for what, garbage in (("other numbers", 5.0), ("NaN", np.nan), ("infinity", np.inf)):
        # Advantages and rewards come from the trainer and are always finite.
        finite = ("advantages", "rewards") if not np.isfinite(garbage) else ()
        names = [name for name in FIELDS if name not in finite]
        arrays = _arrays(inputs)
        filled: dict[str, Any] = {
            n: jnp.where(inputs.mask != 0, arrays[n], garbage + i) for i, n in enumerate(names)
        }
        what = f"with {what} outside the mask (sum or average with inputs.sequence_sum or .sequence_mean)"
        _require_same(run, inputs, dataclasses.replace(inputs, **filled), what, _used(inputs))


def _require_padding(run: Measured, inputs: PolicyInputs) -> None:
    n, t = inputs.mask.shape
    wider = ((0, 2), (0, 3))
    padded: dict[str, Any] = {name: jnp.pad(x, wider) for name, x in _arrays(inputs).items()}
    what = f"with {n + 2} × {t + 3} tokens in place of {n} × {t}"
    _require_same(run, inputs, PolicyInputs(**padded), what, np.pad(_used(inputs), wider))


def _require_rows(run: Measured, inputs: PolicyInputs) -> None:
    every = [*range(len(inputs.mask))]
    for rows in (every[::-1], every[::2]):
        taken = PolicyInputs(**{name: x[np.array(rows)] for name, x in _arrays(inputs).items()})
        what = f"of rows {rows} (a token's loss may use its own sequence only)"
        _require_same(run, inputs, taken, what, _used(taken), rows)


def _require_packing(run: Measured, inputs: PolicyInputs) -> None:
    flat = {name: x.reshape(1, -1) for name, x in _arrays(inputs).items()}
    n, t = inputs.mask.shape
    sequence = jnp.repeat(jnp.arange(n, dtype=jnp.int32), t)[None]
    packed = PolicyInputs(**flat, sequence=sequence, sequences=n)
    what = "with all sequences in one row (inputs.sequence_mean knows about rows)"
    _require_same(run, inputs, packed, what, _used(packed))


LAYOUTS: Mapping[str, Callable[[Measured, PolicyInputs], None]] = {
    "mask": _require_mask,
    "padding": _require_padding,
    "rows": _require_rows,
    "packing": _require_packing,
}
"""{property: raises Broken unless it holds of (program, inputs)}, of what must not change value and gradient."""


def _require_direction(run: Measured, inputs: PolicyInputs) -> None:
    along = float(-(run(inputs)[1] * np.asarray(inputs.advantages)).sum())
    if along == 0:
        raise Broken(
            "at ratio 1 the gradient of logps is 0: nothing would be learned; is logps unused, or behind a "
            "stop_gradient?"
        )
    if along < 0:
        raise Broken(
            f"at ratio 1 a step downhill makes tokens with a negative advantage more likely (−Σ gradient × advantage = "
            f"{along:.3g}); losses are minimised: return the negative"
        )


def _require_optional(loss: Any, absent: str, inputs: PolicyInputs) -> None:
    without: dict[str, Any] = {absent: None}
    try:
        loss(dataclasses.replace(inputs, **without))
    except InputError:
        pass  # it says what it needs
    except Exception as error:
        raise Broken(
            f"{absent}=None: raised {type(error).__name__}: {error}; work without it, or raise an InputError "
            "that says which option of the trainer provides it"
        ) from error


def _split(inputs: PolicyInputs) -> tuple[dict[str, Any], int]:
    packed = {} if inputs.sequence is None else {"sequence": inputs.sequence}
    return {**_arrays(inputs), **packed}, inputs.sequences


TOKENS = LossKind(
    POLICY_LOSS,
    "token",
    ("logps",),
    split=_split,
    join=lambda arrays, sequences: PolicyInputs(**arrays, sequences=sequences),
    used=lambda inputs: inputs.mask != 0,
    smaller=smaller,
)


def _arrays(inputs: PolicyInputs) -> dict[str, Any]:
    return {name: getattr(inputs, name) for name in (*FIELDS, "mask")}


def _used(inputs: PolicyInputs) -> Any:
    return np.asarray(inputs.mask) != 0
