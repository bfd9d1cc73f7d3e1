"""The registry: names, owners and kinds, rewards named by file, and messages for wrong names."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rlhf_core import plugins
from rlhf_core.contracts import ADVANTAGE, LOGGER, MODEL, OPTIMIZER, POLICY_LOSS, REWARD
from rlhf_core.errors import InputError
from rlhf_core.plugins import PluginInfo, Registry
from rlhf_core.plugins.registry import DISTRIBUTED

if TYPE_CHECKING:
    from rlhf_core.contracts import LossOutput, PolicyInputs


@dataclass(frozen=True)
class Tanh:
    def __call__(self, inputs: PolicyInputs) -> LossOutput:
        raise NotImplementedError


@dataclass(frozen=True)
class Child(Tanh):
    """Another thing under the same name."""


def dapo(inputs: PolicyInputs) -> LossOutput:
    raise NotImplementedError


@pytest.fixture
def registry() -> Registry:
    registry = Registry()
    registry.add(POLICY_LOSS, "tanh", Tanh)
    registry.add(POLICY_LOSS, "dapo", dapo)
    registry.add(REWARD, "brevity", lambda completions: [0.0 for _ in completions])
    registry.add(OPTIMIZER, "adamw", lambda learning_rate: learning_rate)
    return registry


def test_names_kinds_and_owners(registry: Registry) -> None:
    assert registry.names(POLICY_LOSS) == ["dapo", "tanh"]
    assert registry.names(ADVANTAGE) == []
    assert [kind.name for kind in registry.kinds()] == ["optimizer", "policy loss", "reward"]
    with registry.transaction("rlhf-x 1.0"):
        registry.add(ADVANTAGE, "group", Child)
    assert registry.owner(ADVANTAGE, "group") == "rlhf-x 1.0"
    assert registry.owner(POLICY_LOSS, "dapo") == f"{__name__}.dapo"
    assert registry.components_of("rlhf-x 1.0") == {"advantage": ["group"]}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that can be imported once, and is gone after the test."""
    name = "module_of_a_component"
    text = (
        "from dataclasses import dataclass\n\n\n@dataclass(frozen=True)\nclass Loss:\n    size: int = 2\n\n"
    )
    (tmp_path / f"{name}.py").write_text(f"{text}    def __call__(self, inputs): ...\n\n\nNUMBER = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_a_text_is_imported_when_the_component_is_asked_for(registry: Registry, package: str) -> None:
    with registry.transaction("rlhf-x"):
        registry.add(POLICY_LOSS, "mine", f"{package}:Loss")
    assert registry.names(POLICY_LOSS) == ["dapo", "mine", "tanh"]
    assert registry.components_of("rlhf-x") == {"policy loss": ["mine"]}
    assert package not in sys.modules
    assert registry.get(POLICY_LOSS, "mine", size=5) == sys.modules[package].Loss(5)
    assert registry.options(POLICY_LOSS, "mine") == ["size"]
    with pytest.raises(InputError, match=rf"'mine' is registered twice: {package}\.Loss by rlhf-x"):
        registry.add(POLICY_LOSS, "mine", Tanh)


@pytest.mark.parametrize(
    ("thing", "said"),
    [
        ("no_such_module:Loss", r"policy loss 'mine' \(from rlhf-x\) failed to load: it .*no_such_module"),
        ("module_of_a_component:Los", r"policy loss 'mine' \(from rlhf-x\) failed to load: it .*Los"),
        ("module_of_a_component:NUMBER", r"policy loss 'mine' .*expected a dataclass or a function, got int"),
    ],
)
def test_a_text_that_names_no_component_is_an_error_where_it_is_used(
    registry: Registry, package: str, thing: str, said: str
) -> None:
    with registry.transaction("rlhf-x"):
        registry.add(POLICY_LOSS, "mine", thing)
    assert "mine" in registry.names(POLICY_LOSS)
    for _ in range(2):
        with pytest.raises(InputError, match=said):
            registry.get(POLICY_LOSS, "mine")


def test_a_failed_transaction_leaves_nothing(registry: Registry) -> None:
    def fail() -> None:
        with registry.transaction("rlhf-bad 0.1"):
            registry.add(ADVANTAGE, "group", Tanh)
            registry.add(POLICY_LOSS, "new", Tanh)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert registry.names(ADVANTAGE) == []
    assert registry.names(POLICY_LOSS) == ["dapo", "tanh"]
    assert ADVANTAGE not in registry.kinds()
    registry.add(ADVANTAGE, "later", Tanh)
    assert registry.owner(ADVANTAGE, "later") == f"{__name__}.Tanh"


def test_a_missing_name_says_what_is_there_and_what_failed(registry: Registry) -> None:
    registry.failures.append(
        PluginInfo("brk", "rlhf-brk", "0.3.0", "failed", "plugin 'brk' failed: no tensorflow.")
    )
    with pytest.raises(InputError) as caught:
        registry.get(ADVANTAGE, "tanh")
    assert str(caught.value) == (
        "no advantage named 'tanh'. No advantage is installed. 'tanh' is of another kind: policy loss. "
        "plugin 'brk' failed: no tensorflow."
    )


# Rewards that nobody registered


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    source = """
from __future__ import annotations
from dataclasses import dataclass

def brevity(completions, target: int = 2): return [target - len(c) for c in completions]

@dataclass
class Scorer:
    scale: float = 1.0
    def __call__(self, completions): return [self.scale] * len(completions)
"""
    (tmp_path / "rewards_of_mine.py").write_text(source)
    yield tmp_path
    sys.modules.pop("rewards_of_mine", None)


@pytest.mark.parametrize("home", ["rewards_of_mine", "rewards_of_mine.py", "./rewards_of_mine.py"])
def test_a_reward_by_its_place(registry: Registry, rewards: Path, home: str) -> None:
    assert registry.get(REWARD, f"{home}:brevity")(["abc"]) == [-1]
    assert registry.get(REWARD, f"{home}:brevity", target=5)(["abc"]) == [2]
    assert registry.get(REWARD, f"{home}:Scorer", scale=2)(["a", "b"]) == [2.0, 2.0]
    assert registry.check(REWARD, f"{home}:brevity", {"targt": 5})[0][1].endswith("Did you mean 'target'?")
    assert registry.names(REWARD) == ["brevity"]


def test_a_file_is_run_once(registry: Registry, rewards: Path) -> None:
    name = f"{rewards}/rewards_of_mine.py:brevity"
    assert registry.get(REWARD, name) is registry.get(REWARD, "rewards_of_mine.py:brevity")


def test_only_packages_that_are_released_with_the_core_are_named_for_installation(repository: Path) -> None:
    released = {f"rlhf-{path.parent.name}" for path in repository.glob("plugins/*/pyproject.toml")}
    assert {package.partition("[")[0] for package in DISTRIBUTED.values()} <= released
    registry = plugins.load().registry
    families = [registry.get(MODEL, name) for name in registry.names(MODEL)]
    types = {each.removesuffix("_text") for family in families for each in family.name}
    for kind, name in DISTRIBUTED:
        assert name in (types if kind == MODEL else registry.names(kind))
    empty = Registry()
    cases = [
        (REWARD, "length", " (pip install rlhf-rewards)"),
        (LOGGER, "wandb", " (pip install 'rlhf-trackers[wandb]')"),
        (LOGGER, "dpo", ""),
    ]
    for kind, name, package in cases:
        with pytest.raises(InputError) as caught:
            empty.get(kind, name)
        assert str(caught.value).endswith(
            f"Install the package that has it{package}, or give its file with --plugin."
        )
