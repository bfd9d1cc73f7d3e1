"""Hashes of a stage's inputs: every byte counts, large files are hashed once, data and code count by content."""

from __future__ import annotations

import errno
import functools
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from rlhf_sft import SFTConfig

from rlhf_core import artifacts, installed_registry
from rlhf_core.errors import InputError
from rlhf_core.plugins import load_file
from rlhf_core.stage import identity
from tests.shared.specs import given_from_python, recorded_as

OLD = 1_600_000_000_000_000_000


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hashes.json"


def large(path: Path, *, flip: int | None = None) -> Path:
    content = bytearray(2 * identity.SMALL)
    if flip is not None:
        content[flip] ^= 1
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, ns=(OLD, OLD))
    return path


@pytest.mark.parametrize("at", [0, identity.SMALL - 1, identity.SMALL + 7, 2 * identity.SMALL - 1])
def test_every_byte_of_a_directory_counts(tmp_path: Path, at: int) -> None:
    large(tmp_path / "a" / "model.safetensors")
    large(tmp_path / "b" / "model.safetensors", flip=at)
    assert identity.identify(tmp_path / "a") != identity.identify(tmp_path / "b")
    large(tmp_path / "c" / "model.safetensors")
    large(tmp_path / "c" / ".git" / "index")  # files of version control are not part of a model
    assert identity.identify(tmp_path / "a") == identity.identify(tmp_path / "c")


def test_a_directory_given_by_mistake_is_not_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "MOST_FILES", 3)
    for name in "abc":
        (tmp_path / name).touch()
    identity.identify(tmp_path)
    (tmp_path / "d").touch()
    with pytest.raises(InputError, match=r"is a directory of more than 3 files: give a data file"):
        identity.identify(tmp_path)


def test_a_large_file_is_hashed_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    real = artifacts.hash_file

    def counting(path: Any) -> str:
        hashed.append(Path(path).name)
        return real(path)

    monkeypatch.setattr(artifacts, "hash_file", counting)
    monkeypatch.setattr(identity, "SETTLED_SECONDS", -60)
    large(tmp_path / "m" / "weights")
    (tmp_path / "m" / "config.json").write_text("{}")
    first = identity.identify(tmp_path / "m")
    assert identity.identify(tmp_path / "m") == first
    assert hashed.count("weights") == 1
    assert hashed.count("config.json") == 2
    damaged = bytearray(cache.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    cache.write_bytes(damaged)
    assert identity.identify(tmp_path / "m") == first
    assert hashed.count("weights") == 2
    large(tmp_path / "m" / "weights", flip=5)  # with the size, inode and modification time that it had
    assert identity.identify(tmp_path / "m") != first


def test_a_file_that_was_written_just_now_is_not_remembered(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(identity.SMALL))
    stamp = path.stat().st_mtime_ns
    first = identity.identify(path)
    path.write_bytes(b"\1" + bytes(identity.SMALL - 1))
    os.utime(path, ns=(stamp, stamp))
    assert identity.identify(path) != first


def test_rows_in_memory_count_by_content() -> None:
    import datasets
    import pandas

    rows = [{"text": "a", "n": 1}, {"text": "b", "n": 2}]
    others = [{"text": "a", "n": 1}, {"text": "b", "n": 3}]
    for made in (lambda x: x, datasets.Dataset.from_list, pandas.DataFrame):
        assert identity.of_rows(made(rows)) == identity.of_rows(made([dict(row) for row in rows]))
        assert identity.of_rows(made(rows)) != identity.of_rows(made(others))
        assert identity.of_rows(made(rows)) != identity.of_rows(made(rows[::-1]))
    datasets_of = [datasets.Dataset.from_list(each) for each in (rows, others)]
    assert identity.of_rows(datasets_of) == identity.of_rows([datasets_of[0], others])
    assert identity.of_rows(datasets_of) != identity.of_rows(datasets_of[::-1])
    assert identity.of_rows([{"x": np.arange(5)}]) != identity.of_rows([{"x": np.arange(1, 6)}])


def test_files_named_beside_rows_in_memory_count_by_content(tmp_path: Path) -> None:
    for name, text in (("a", "1"), ("b", "1"), ("c", "2")):
        (tmp_path / f"{name}.jsonl").write_text(text)
    a, b, c = (
        identity.of_rows([[{"text": "x"}], {"path": str(tmp_path / f"{name}.jsonl"), "weight": 2}])
        for name in "abc"
    )
    assert a == b != c


def test_data_is_recorded_by_name_or_by_content() -> None:
    """As a pipeline's field would name it; what has no name is told by its rows."""
    import datasets

    rows, registry = [{"text": "a"}, {"text": "b"}], installed_registry()

    def record(given: Any) -> dict[str, Any]:
        return given_from_python("sft", SFTConfig(), registry, train_dataset=given)

    for named in ("a/b", ["a/b", "c/d"], [{"path": "e/f", "weight": 2}]):
        made = record(named)
        assert made["config"]["train_data"] == named
        assert made["inputs"] == {}
    for unnamed in (rows, datasets.Dataset.from_list(rows), [rows, rows[:1]]):
        made = record(unnamed)
        assert made["config"].get("train_data") is None
        assert made["inputs"]["train_data"]["identity"] == identity.of_rows(unnamed)


def test_a_model_counts_by_its_parameters_and_configuration(tiny: types.ModuleType) -> None:
    model = tiny.make_model()
    assert identity.of_model(model) == identity.of_model(tiny.make_model())
    assert identity.of_model(model) != identity.of_model(tiny.make_model(seed=2))
    assert identity.of_model(model) != identity.of_model(tiny.make_model(rope_theta=1234.0))


CODE = """
from dataclasses import dataclass
import functools

def reward(completions, scale={scale}):
    return [float(len(text) * scale) for text in completions]

@dataclass
class Judge:
    threshold: float = {scale}
    def __post_init__(self):
        self.calls = 0
    def __call__(self, completions):
        self.calls += 1
        return [len(text) for text in completions]

partial = functools.partial(reward, scale={scale})
"""


def module(directory: Path, scale: float = 1.0) -> types.ModuleType:
    path = directory / f"code_{len(list(directory.iterdir()))}.py"
    path.write_text(CODE.format(scale=scale))
    return load_file(path)


def test_code_given_from_python_counts_by_its_source_and_what_it_was_made_with(tmp_path: Path) -> None:
    one, same, other = module(tmp_path), module(tmp_path), module(tmp_path, 2.0)
    of = identity.of_callable
    assert of(one.reward) == of(same.reward) != of(other.reward)
    assert of(one.partial) == of(same.partial) != of(other.partial)
    assert of(one.Judge()) == of(same.Judge()) != of(other.Judge())
    assert of(functools.partial(one.reward, scale=3)) != of(one.partial)
    assert of(one.Judge(0.5)) == of(one.Judge(0.5)) != of(one.Judge(0.6))
    judge, before = one.Judge(), of(one.Judge())
    judge(["a"])
    assert of(judge) == before  # what it counts itself is left out
    assert of(len) != of(max)  # by name, as there is no source


OPTIMIZER = """
import jax
import optax

def descend(rate):
    def update(gradients, state, params=None):
        return jax.tree.map(lambda x: -rate * x, gradients), state
    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)

def rates(step):
    return 0.01
"""


def test_an_optimizer_and_a_schedule_given_from_python_count_by_their_source(tmp_path: Path) -> None:
    """Those of optax by its version, and records that have a hash of another kind, of no owner, are not compared."""

    def record(optimizers: Any) -> dict[str, Any]:
        return given_from_python("sft", SFTConfig(), installed_registry(), optimizers=optimizers)

    def own(number: int, source: str) -> dict[str, Any]:
        path = tmp_path / str(number) / "descent.py"
        path.parent.mkdir()
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("descent", path)
        assert spec is not None
        assert spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        return record((made.descend(0.1), made.rates))

    def refused(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
        return [str(each) for each in recorded_as(now).diff(before).refused]

    first = own(0, OPTIMIZER)
    assert refused(first, own(1, OPTIMIZER)) == []
    assert refused(first, own(2, OPTIMIZER.replace("-rate", "-2 * rate"))) == [
        "optimizer: the code of 'update' (descent) has changed since"
    ]
    assert refused(first, own(3, OPTIMIZER.replace("0.01", "0.02"))) == [
        "scheduler: the code of 'rates' (descent) has changed since"
    ]
    of_optax = record((optax.sgd(0.1), optax.linear_schedule(0.1, 0.0, 10)))
    assert not {"optimizer", "scheduler"} & {*of_optax["code"]}
    traced = {name: {"name": name, "owner": "", "hash": "0"} for name in ("optimizer", "scheduler")}
    for now in (first, of_optax):
        assert refused({**now, "code": {**now["code"], **traced}}, now) == []


def test_a_plugins_code_counts_by_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = []
    for number, text in enumerate(("X = 1\n", "X = 2\n")):
        name = f"package_of_tests_{number}"
        home = tmp_path / name
        home.mkdir()
        (home / "__init__.py").write_text("from .inner import loss\n")
        (home / "inner.py").write_text("def loss(inputs):\n    return inputs\n")
        (home / "other.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        hashes.append(identity.of_component(__import__(name).loss))
        for loaded in [key for key in sys.modules if key.startswith(name)]:
            monkeypatch.delitem(sys.modules, loaded)
    assert None not in hashes
    assert hashes[0] != hashes[1]
    assert identity.of_component(identity.identify) is None  # rlhf-core is identified by its version


@pytest.mark.parametrize("name", ["sft", "reward", "dpo", "online_dpo", "kto", "grpo", "distill"])
def test_a_trainers_code_counts(name: str) -> None:
    from rlhf_core import TRAINER, installed_registry

    trainer = installed_registry().get(TRAINER, name)
    package = sys.modules[f"rlhf_{name.removeprefix('online_')}"]
    assert identity.of_component(trainer) == identity.of_component(trainer.build) is not None
    assert Path(package.__file__ or "").parent.name == package.__name__


def test_a_file_that_may_not_be_looked_at_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    alone = identity.identify(tmp_path)
    (tmp_path / "secret").write_text("")
    look = os.stat

    def refuse(path: Any, **how: Any) -> os.stat_result:
        if os.fspath(path).endswith("secret"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return look(path, **how)

    monkeypatch.setattr(os, "stat", refuse)
    assert identity.identify(tmp_path) == alone
