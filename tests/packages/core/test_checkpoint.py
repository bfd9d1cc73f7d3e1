"""Checkpoints: exact round trips, also onto other meshes, retention, and damage that is noticed."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rlhf_core import checkpoint
from rlhf_core.checkpoint import Checkpoints
from rlhf_core.errors import InputError, RunError
from rlhf_core.mesh import make_mesh
from tests.shared.compiled import compilations

TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params", "opt", "key", "extra"],
    meta_fields=["tx"],
)
@dataclasses.dataclass(frozen=True)
class State:
    step: Any
    params: Any
    opt: Any
    key: Any
    extra: Any
    tx: Any


def make_state(seed: int = 0) -> State:
    params = {
        "layers": {"q_proj": {"kernel": jax.random.normal(jax.random.key(seed), (4, 8, 16))}},
        "embed": jax.random.normal(jax.random.key(seed + 1), (32, 8)).astype(jnp.bfloat16),
    }
    opt = TX.init(params)
    _, opt = TX.update(jax.tree.map(jnp.ones_like, params), opt, params)
    return State(jnp.int32(seed), params, opt, jax.random.key(seed), {"none": None, "empty": {}}, TX)


def place(state: State, mesh: Any, spec: PartitionSpec) -> State:
    def one(x: Any) -> Any:
        return jax.device_put(x, NamedSharding(mesh, spec if x.ndim > 1 else PartitionSpec()))

    return jax.tree.map(one, state)


def abstract(state: State) -> State:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def raw(x: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def assert_same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert raw(x).tobytes() == raw(y).tobytes()


@pytest.fixture
def opened(tmp_path: Path) -> Any:
    found = Checkpoints(tmp_path / "checkpoints", keep=None)
    yield found
    found.close()


@pytest.fixture(params=["in one transaction", "array by array"])
def either(
    opened: Checkpoints, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Checkpoints:
    """Write few bytes as a small state or as a large one is written."""
    if request.param == "array by array":
        monkeypatch.setattr(checkpoint, "ENCODED_AT_ONCE", 1)
    return opened


def test_restores_every_bit_of_tree_key_host_and_arrays(either: Checkpoints) -> None:
    state = make_state(3)
    arrays = {
        "file": np.arange(6, dtype=np.int32).reshape(2, 3),
        "x/y": np.float32([np.nan, 1.5]),
        "none": np.zeros((0, 4)),
    }
    host = {"tokens": 2**53, "feed": {"batch": 7, "seen": [1, None, "ü"]}, "elapsed": 0.1}
    either.save(7, state, host=host, arrays=arrays, block=True)
    found = either.restore(abstract(state))
    assert found is not None
    assert (found.step, found.host) == (7, host)
    assert_same(found.state, state)
    assert jax.random.uniform(found.state.key) == jax.random.uniform(state.key)
    assert set(found.arrays) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array)
        assert found.arrays[name].dtype == array.dtype


def test_numpy_numbers_are_kept_and_what_no_file_can_hold_is_reported(opened: Checkpoints) -> None:
    state = make_state()
    opened.save(1, state, host={"next": np.int64(7), "best": np.float32(0.5)}, arrays={}, block=True)
    found = opened.restore(abstract(state))
    assert found is not None
    assert found.host == {"next": 7, "best": 0.5}
    with pytest.raises(TypeError, match=r"a checkpoint cannot keep \{1\}; make it a number"):
        opened.save(2, state, host={"seen": {1}}, arrays={})
    with pytest.raises(TypeError, match="rewards"):
        opened.save(2, state, host={}, arrays={"rewards": np.array([None, 1])})
    with pytest.raises(ValueError, match="same dotted path"):
        opened.save(2, {"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}}, host={})
    assert opened.steps() == [1]


def test_arrays_may_change_shape_and_be_left_out(opened: Checkpoints) -> None:
    state = make_state()
    opened.save(1, state, host={}, arrays={"rollout": np.ones((3, 5))})
    opened.save(2, state, host={}, arrays={"rollout": np.ones((7, 2))})
    opened.save(3, state, host={})
    assert opened.steps() == [1, 2]  # the third is still being written
    opened.wait()
    found = opened.restore(abstract(state))
    assert found is not None
    assert (found.step, found.arrays) == (3, {})


def test_save_copies_host_arrays_and_outlives_donation(either: Checkpoints) -> None:
    state = make_state()
    expected = jax.tree.map(raw, state)
    batch = np.ones(1000)
    step = jax.jit(lambda s: jax.tree.map(lambda x: x if x.ndim == 0 else x + 1, s), donate_argnums=0)
    either.save(1, state, host={}, arrays={"batch": batch})
    batch[:] = 5
    moved = step(state)
    either.wait()
    found = either.restore(abstract(moved))
    assert found is not None
    assert found.arrays["batch"].sum() == 1000
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), jax.tree.map(raw, found.state), expected)


def test_restores_onto_another_mesh(either: Checkpoints) -> None:
    state = make_state(5)
    saved = place(state, make_mesh(fsdp=4, tensor=2), PartitionSpec("fsdp", "tensor"))
    either.save(1, saved, host={}, block=True)
    for mesh, spec in [
        (make_mesh(data=2, fsdp=4), PartitionSpec(None, "fsdp")),
        (make_mesh(devices=jax.devices()[:1]), PartitionSpec()),
    ]:
        wanted = place(state, mesh, spec)
        found = either.restore(abstract(wanted))
        assert found is not None
        assert_same(found.state, state)
        kernel = found.state.params["layers"]["q_proj"]["kernel"]
        assert kernel.sharding == wanted.params["layers"]["q_proj"]["kernel"].sharding
        assert found.state.opt[1][0].mu["embed"].sharding == wanted.opt[1][0].mu["embed"].sharding


def test_replicas_share_the_work_of_large_arrays_alone(opened: Checkpoints) -> None:
    """Which takes programs that cut the array up: for a small one they cost more than they save."""
    everywhere = NamedSharding(make_mesh(data=8), PartitionSpec())
    states = [{"x": jax.device_put(np.arange(size, dtype=np.float32), everywhere)} for size in (24, 2**21)]
    with compilations() as programs:
        for step, state in enumerate(states):
            opened.save(step, state, host={}, block=True)
            assert bool(programs) == (step == 1)
    for step, state in enumerate(states):
        restored = opened.restore(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state), step)
        assert restored is not None
        np.testing.assert_array_equal(restored.state["x"], state["x"])


@pytest.mark.parametrize("keep", [1, 2, None])
def test_retention_keeps_the_newest(tmp_path: Path, keep: int | None) -> None:
    found = Checkpoints(tmp_path, keep=keep)
    assert found.restore(abstract(make_state())) is None
    for step in (1, 5, 10, 30):
        found.save(step, make_state(step), host={})
    found.close()
    found.close()
    assert found.steps() == {1: [30], 2: [10, 30], None: [1, 5, 10, 30]}[keep]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    with pytest.raises(ValueError, match="at least 1"):
        Checkpoints(tmp_path, keep=0)


def flip(path: Path, at: int = -3) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(bytes(content))


def largest(directory: Path) -> Path:
    return max((p for p in directory.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


@pytest.mark.parametrize(
    "harm", ["bit of the state", "bit of the manifest", "bit of host.json", "lost file", "cut file"]
)
def test_damage_falls_back_and_says_so(tmp_path: Path, harm: str) -> None:
    found = Checkpoints(tmp_path, keep=1)
    found.save(1, make_state(1), host={"n": 1}, block=True)
    shutil.copytree(tmp_path / "1", tmp_path / "aside")
    found.save(2, make_state(2), host={"n": 2}, block=True)
    os.rename(tmp_path / "aside", tmp_path / "1")  # retention had removed it
    newest = tmp_path / "2"
    victim = largest(newest / "state")
    if harm == "bit of the state":
        flip(victim, at=victim.stat().st_size // 2)
    elif harm == "bit of the manifest":
        flip(newest / "manifest.json", at=40)
    elif harm == "bit of host.json":
        flip(newest / "host.json")
    elif harm == "lost file":
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=r"damaged checkpoint: .*/2/.*resuming from step 1"):
        restored = found.restore(abstract(make_state()))
    assert restored is not None
    assert (restored.step, restored.host) == (1, {"n": 1})
    assert_same(restored.state, make_state(1))

    # The next save of the step takes the place of the damaged one.
    found.save(2, make_state(7), host={"n": 7}, block=True)
    assert found.steps() == [2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = found.restore(abstract(make_state()))
    found.close()
    assert again is not None
    assert_same(again.state, make_state(7))


@pytest.mark.parametrize("every", [389, pytest.param(7, marks=pytest.mark.exhaustive)])
def test_every_flipped_bit_of_its_manifest_is_noticed(opened: Checkpoints, every: int) -> None:
    opened.save(1, make_state(), host={}, block=True)
    manifest = opened.directory / "1" / "manifest.json"
    whole = manifest.read_bytes()
    for bit in range(0, 8 * len(whole), every):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        manifest.write_bytes(bytes(content))
        with pytest.raises(RunError, match=r"manifest\.json is damaged"):
            opened.restore(abstract(make_state()))


def test_a_checkpoint_in_the_place_of_another_step_is_reported(tmp_path: Path) -> None:
    found = Checkpoints(tmp_path, keep=3)
    for step in (1, 2):
        found.save(step, make_state(step), host={"n": step}, block=True)
    shutil.rmtree(tmp_path / "2")
    shutil.copytree(tmp_path / "1", tmp_path / "2")
    with pytest.warns(UserWarning, match=r"/2 holds the checkpoint of step 1; resuming from step 1"):
        restored = found.restore(abstract(make_state()))
    found.close()
    assert restored is not None
    assert (restored.step, restored.host) == (1, {"n": 1})


def test_a_damaged_later_step_does_not_push_out_a_whole_one(tmp_path: Path) -> None:
    found = Checkpoints(tmp_path, keep=2)
    for step in (10, 20):
        found.save(step, make_state(step), host={}, block=True)
    flip(largest(tmp_path / "20" / "state"))
    with pytest.warns(UserWarning, match="resuming from step 10"):
        found.restore(abstract(make_state()))
    found.save(15, make_state(15), host={}, block=True)
    found.close()
    assert found.steps() == [10, 15]


def test_all_damaged_is_an_error_not_a_fresh_start(opened: Checkpoints) -> None:
    for step in (1, 2):
        opened.save(step, make_state(), host={}, block=True)
        flip(largest(opened.directory / str(step) / "state"))
    with pytest.raises(RunError, match=r"no checkpoint in.*Delete that directory"):
        opened.restore(abstract(make_state()))


def test_another_tree_names_the_arrays(opened: Checkpoints) -> None:
    state = make_state()
    opened.save(1, state, host={}, block=True)
    params = {**state.params, "embed": jnp.zeros((32, 9), jnp.bfloat16), "new": jnp.zeros(2)}
    with pytest.raises(InputError) as caught:
        opened.restore(abstract(dataclasses.replace(state, params=params)))
    text = str(caught.value)
    assert "params.embed: saved as bfloat16[32,8], now bfloat16[32,9]" in text
    assert "params.new: saved as nothing, now float32[2]" in text
    assert "q_proj" not in text


def test_a_kill_while_a_step_is_replaced_loses_nothing_and_leftovers_are_removed(opened: Checkpoints) -> None:
    opened.save(1, make_state(1), host={}, block=True)
    os.rename(opened.directory / "1", opened.directory / ".1.replaced")  # between two renames
    found = opened.restore(abstract(make_state()))
    assert found is not None
    assert found.step == 1
    shutil.copytree(opened.directory / "1", opened.directory / ".9.tmp")
    shutil.copytree(opened.directory / "1", opened.directory / ".1.replaced", dirs_exist_ok=True)
    found = opened.restore(abstract(make_state()))
    assert found is not None
    assert found.step == 1
    opened.save(2, make_state(2), host={}, block=True)
    assert sorted(path.name for path in opened.directory.iterdir()) == ["1", "2"]
