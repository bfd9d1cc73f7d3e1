"""Several models in one state: every rule by path applies to each of them, at any depth, or is refused.

Parameters that are not trained have no gradient, no optimizer state and no copy; their values stay.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlhf_core import create_state, optimizers
from rlhf_core.errors import InputError
from rlhf_core.mesh import make_mesh
from rlhf_core.metrics import Mean
from rlhf_core.models import matching, numbered, paths, without_layers
from rlhf_core.optimizers import adamw, muon
from rlhf_core.step import Accumulated, Programs, apply, split_step

LORA = {"rank": 2, "base": "base"}
BATCH = jnp.zeros((2, 1))


def objective(params: Any, batch: Any) -> Any:
    """Give every parameter the gradient 1."""
    floats = [x for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.floating)]
    return Mean(sum(x.sum() for x in floats) + 0 * batch.sum(), jnp.float32(1)), {}


@jax.jit
def updated(state: Any) -> Any:
    """Return the parameters after one update."""
    return split_step(objective, state, BATCH, 1)[0].params


def moves(state: Any) -> dict[str, float]:
    """Return {path: how far one update moves the parameter}."""
    before = {path: np.asarray(leaf) for path, leaf in paths(state.params)}
    after = updated(state)
    far = {path: np.abs(np.asarray(leaf, float) - before[path].astype(float)) for path, leaf in paths(after)}
    for path, each in far.items():
        np.testing.assert_allclose(each, each.max(), atol=1e-6, err_msg=".".join(path))
    return {".".join(path): round(float(each.max()), 3) for path, each in far.items()}


def trained(policy: float, critic: float, state: Any, critic_adapted: bool) -> dict[str, float]:
    """Return what must move: adapters and the reward head of a model with adapters, everything of one without."""
    rates = {}
    for path, _ in paths(state.params):
        adapted = path[0] == "policy" or critic_adapted
        moving = not adapted or "adapter" in path or path[1] == "score"
        rates[".".join(path)] = (policy if path[0] == "policy" else critic) * moving
    return rates


@pytest.fixture
def policy(tiny: Any) -> Any:
    return tiny.make_model().with_lora(**LORA)


@pytest.fixture
def critic(tiny: Any) -> Any:
    return tiny.make_model("score", seed=2)


@pytest.mark.parametrize("adapted", [False, True])
def test_adapters_on_one_model_leave_the_other_to_be_trained(policy: Any, critic: Any, adapted: bool) -> None:
    """A critic with adapters trains its fresh head; also where both are nested by hand into one optimizer."""
    critic = critic.with_lora(**LORA) if adapted else critic
    tx = {"policy": optax.sgd(0.5), "critic": optax.sgd(0.125)}
    state = create_state({"policy": policy, "critic": critic}, tx)
    assert moves(state) == trained(0.5, 0.125, state, adapted)
    assert state.model["critic"] == critic.definition
    both = policy.with_params({"policy": policy.params, "critic": critic.params})
    nested = create_state(both, optax.sgd(0.5))
    assert moves(nested) == trained(0.5, 0.5, nested, adapted)


def test_a_head_of_ones_own_beside_a_model_with_adapters_is_trained(policy: Any) -> None:
    model = policy.with_params({**policy.params, "value": {"kernel": jnp.ones((16, 1))}})
    moved = moves(create_state(model, optax.sgd(0.5)))
    assert moved["value.kernel"] == 0.5
    assert moved["embed_tokens.embedding"] == 0


def test_what_cannot_be_inferred_is_refused(policy: Any, critic: Any) -> None:
    other = {**critic.with_lora(**LORA).params, "value": {"kernel": jnp.ones((16, 1))}}
    both = policy.with_params({"policy": policy.params, "critic": other})
    with pytest.raises(
        InputError, match=r"'critic.value.kernel' is not a parameter .* create_state\({'policy'"
    ):
        create_state(both, optax.sgd(0.5))


@pytest.mark.parametrize(
    ("frozen", "still"),
    [
        ({"critic": ".*"}, lambda path: path.startswith("critic.")),
        ({"critic": ["embed"]}, lambda path: path.startswith("critic.embed")),
        (r"^critic\.layers", lambda path: path.startswith("critic.layers")),
    ],
)
def test_frozen_by_model(tiny: Any, critic: Any, frozen: Any, still: Any) -> None:
    models = {"policy": tiny.make_model(), "critic": critic}
    tx = {"policy": optax.sgd(0.5), "critic": optax.sgd(0.125)}
    moved = moves(create_state(models, tx, frozen=frozen))
    assert {path for path, far in moved.items() if not far} == {path for path in moved if still(path)}


@pytest.mark.parametrize(
    ("tx", "frozen", "message"),
    [
        ({"policy": optax.sgd(1.0)}, None, "tx: missing for 'critic', which is trained"),
        ({"policy": optax.sgd(1.0), "crtic": optax.sgd(1.0)}, None, "Did you mean 'critic'"),
        (optax.sgd(1.0), {"crtic": "embed"}, "Did you mean 'critic'"),
        (optax.sgd(1.0), {"policy": ".*", "critic": ".*"}, "nothing would be trained"),
    ],
)
def test_names_that_do_not_fit(policy: Any, critic: Any, tx: Any, frozen: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        create_state({"policy": policy, "critic": critic}, tx, frozen=frozen)


@pytest.mark.parametrize("make", [muon, pytest.param(adamw, marks=pytest.mark.long)])
def test_weight_decay_and_muon_go_by_the_layer_at_any_depth(make: Any, tiny: Any) -> None:
    """A nested model is updated exactly as if it were alone."""
    model = tiny.make_model(seed=3)
    tx = make(0.1, weight_decay=0.5)
    alone = updated(create_state(model, tx))
    nested = model.with_params({"policy": model.params})
    inner = updated(create_state(nested, tx))["policy"]
    jax.tree.map(np.testing.assert_array_equal, inner, alone)
    named = updated(create_state({"policy": model}, {"policy": tx}))
    jax.tree.map(np.testing.assert_array_equal, named["policy"], alone)


def test_a_critic_made_from_the_policy_trains_with_it(tiny: Any) -> None:
    """Both trunks are the same arrays, which an update would overwrite twice."""
    policy = tiny.make_model()
    models = {"policy": policy, "critic": policy.with_head("score")}
    state = create_state(models, {"policy": optax.sgd(0.5), "critic": optax.sgd(0.125)})
    before = jax.tree.map(np.asarray, state.params)
    steps = Programs(objective, state)
    for _ in range(2):
        state, _ = steps.apply(state, steps.accumulate(state, BATCH, None))
    for name, rate in (("policy", 0.5), ("critic", 0.125)):
        far = before[name]["norm"]["weight"] - np.asarray(state.params[name]["norm"]["weight"])
        np.testing.assert_allclose(far, 2 * rate, rtol=1e-6)


def test_each_optimizers_state_lies_where_its_parameters_do(tiny: Any) -> None:
    mesh = make_mesh(fsdp=2, devices=jax.devices()[:2])
    models = {}
    for name, model in (("policy", tiny.make_model()), ("critic", tiny.make_model("score", seed=2))):
        spread = jax.device_put(model.params, model.definition.shardings(mesh))
        models[name] = dataclasses.replace(model, params=spread, mesh=mesh)
    state = create_state(models, {name: optax.adam(1e-3) for name in models})
    for name in models:
        wanted = jax.tree.map(lambda x: x.sharding, state.params[name])
        assert jax.tree.map(lambda x: x.sharding, state.opt_state[name][0].mu) == wanted


def test_models_of_different_meshes_are_refused(tiny: Any, policy: Any) -> None:
    other = dataclasses.replace(policy, mesh=make_mesh(devices=jax.devices()[:2]))
    with pytest.raises(InputError, match="'policy' and 'critic' are on different meshes"):
        create_state({"policy": policy, "critic": other}, optax.sgd(1.0))


def test_a_model_is_saved_with_its_own_parameters_only(tiny: Any, tmp_path: Any) -> None:
    for model in (tiny.make_model(), tiny.make_model().with_lora(**LORA)):
        with pytest.raises(InputError, match=r"policy.with_params\(state.params\['policy'\]\)"):
            model.with_params({"policy": model.params}).save(tmp_path / "nested")
        with pytest.warns(UserWarning, match=r"no place for value.kernel"):
            model.with_params({**model.params, "value": {"kernel": jnp.ones((16, 1))}}).save(
                tmp_path / "more"
            )


STACKED = {
    "embed": {"w": jnp.ones(2)},
    "layers": {
        "full": {"mlp": {"w": jnp.ones((1, 2))}, "attn": {"w": jnp.ones((1, 2))}},
        "sliding": {"mlp": {"w": jnp.ones((2, 2))}, "conv1d": {"w": jnp.ones((2, 2))}},
    },
}
STACKS = {"full": SimpleNamespace(layers=(1,)), "sliding": SimpleNamespace(layers=(0, 2))}
MODEL = SimpleNamespace(config=SimpleNamespace(stacks=STACKS))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"layers\.0\.", {"layers.0.mlp.w", "layers.0.conv1d.w"}),
        (r"embed|layers\.[12]\.mlp", {"embed.w", "layers.1.mlp.w", "layers.2.mlp.w"}),
        (
            r"^(embed|layers\.(0|1))\.",
            {"embed.w", *(f"layers.{n}.w" for n in ("0.mlp", "0.conv1d", "1.mlp", "1.attn"))},
        ),
        # The numbers tell which layers, and names alone tell nothing of numbers.
        (r"layers\.(?!2\.)", {f"layers.{n}.w" for n in ("0.mlp", "0.conv1d", "1.mlp", "1.attn")}),
        (r"^layers\.\w+\.(?!mlp)", {"layers.1.attn.w", "layers.0.conv1d.w", "layers.2.conv1d.w"}),
        (r"layers\.0\.mlp|layers\.full", {"layers.0.mlp.w", "layers.1.mlp.w", "layers.1.attn.w"}),
        (
            r"(layers\.sliding\.conv1d|layers\.2)\.",
            {f"layers.{n}.w" for n in ("0.conv1d", "2.conv1d", "2.mlp")},
        ),
        (r"layers\..\.attn", {"layers.1.attn.w"}),
        (r"conv1d", {"layers.0.conv1d.w", "layers.2.conv1d.w"}),
    ],
)
def test_expressions_name_layers_by_number_or_all_of_them(pattern, expected):
    found = matching(STACKED, pattern, MODEL)
    names = {
        name
        for path, leaf in paths(STACKED)
        for name, index in numbered(MODEL, path, leaf)
        if path in found.whole or index in found.layers.get(path, ())
    }
    assert names == expected
    assert not found.absent


@pytest.mark.parametrize(
    ("pattern", "absent"),
    [
        (r"embed|layers\.7\.", [r"layers\.7\."]),
        (r"layers\.(0|9)\.", ["9"]),
        (r"mpl|(embed|nrom)|[|)]|\|", ["mpl", "nrom", "[|)]", r"\|"]),
        (r"layers\.(?!0|9)\d", []),
    ],
)
def test_alternatives_without_a_match_are_told(pattern, absent):
    assert matching(STACKED, pattern, MODEL).absent == [(each, pattern) for each in absent]


@pytest.fixture(scope="module")
def model(tiny):
    return tiny.make_model()


@pytest.mark.parametrize("name", ["adamw", pytest.param("adafactor", marks=pytest.mark.long), "muon"])
def test_layers_that_are_not_trained_are_as_if_they_were_not_there(model, name):
    """The others are updated by the optimizer, its averages and the clipping as in a model of them alone."""
    frozen = r"embed|layers\.1\."
    make = getattr(optimizers, name)
    tx = optax.chain(optax.clip_by_global_norm(0.1), make(0.1, weight_decay=0.5))
    state = create_state(model, tx, frozen=frozen)
    draw = np.random.default_rng(0)
    grads = jax.tree.map(lambda x: draw.normal(size=x.shape).astype(np.float32), state.trained().params)
    after, metrics = apply(state.trained(), Accumulated(grads, Mean.of(jnp.ones(1)), {}), by_layer=True)
    own, own_grads = (without_layers(x, state.fixed_layers) for x in (state.trained().params, grads))
    updates, moments = tx.update(own_grads, tx.init(own), own)
    expected = optax.apply_updates(own, updates)
    jax.tree.map(np.testing.assert_array_equal, without_layers(after.params, state.fixed_layers), expected)
    jax.tree.map(np.testing.assert_array_equal, after.opt_state, moments)
    assert metrics["grad_norm"].total == optax.tree.norm(own_grads)
    assert "grad_norm/layers.1" not in metrics
    assert state.fixed_layers
    for path, layers in state.fixed_layers:
        assert layers == (1,)
        old, new = (dict(paths(x))[path] for x in (state.params, after.params))
        np.testing.assert_array_equal(new[1], old[1])
        assert not np.array_equal(new[0], old[0])
