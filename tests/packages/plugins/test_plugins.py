"""Load plugins from made-up distributions, files and objects; a failing one harms no other."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import types
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlhf_core import plugins
from rlhf_core.artifacts import versions
from rlhf_core.config import TrainerConfig
from rlhf_core.contracts import ADVANTAGE, POLICY_LOSS, REWARD, Kind
from rlhf_core.errors import InputError
from rlhf_core.plugins import PluginInfo, PluginWarning, Registry, hookimpl
from rlhf_core.runtime import distributions
from tests.shared.site import forget, install

ADDS = """
from rlhf_core import hookimpl

def loss(inputs, *, epsilon: float = 0.2): ...

@hookimpl
def rlhf_register(registry):
    registry.add(POLICY_LOSS, "{name}", loss)
"""

REGISTER = f"from rlhf_core import POLICY_LOSS{ADDS}"


class World:
    """Distributions that exist for one test only, as files that importlib.metadata reads."""

    def __init__(self, site: Path) -> None:
        self.site = site

    def install(
        self, point: str, source: str, *, distribution: str = "", version: str = "1.0", requires: str = ""
    ) -> None:
        """Install a module with hooks."""
        distribution = distribution or f"rlhf-{point}"
        module = f"made_up_{distribution.replace('-', '_')}"
        (self.site / f"{module}.py").write_text(source)
        self.install_points(distribution, f"[rlhf]\n{point} = {module}\n", version=version, requires=requires)

    def install_points(
        self, distribution: str, points: str, *, version: str = "1.0", requires: str = ""
    ) -> None:
        """Install the metadata of a distribution. points: its entry_points.txt."""
        install(self.site, distribution, points, version=version, requires=requires)

    def load(self, **arguments: Any) -> tuple[plugins.Host, dict[str, PluginInfo], list[str]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            host = plugins.load(**arguments)
        said = [str(w.message) for w in caught if issubclass(w.category, PluginWarning)]
        return host, {info.name: info for info in host.plugins}, said


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install nothing except what the test installs."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("RLHF_DISABLE_PLUGINS", raising=False)

    def entry_points() -> Any:
        found = [p for d in importlib.metadata.distributions(path=[str(tmp_path)]) for p in d.entry_points]
        return importlib.metadata.EntryPoints(found)

    monkeypatch.setattr(distributions, "entry_points", entry_points)
    forget()
    before = set(sys.modules)
    yield World(tmp_path)
    for name in sys.modules.keys() - before:
        if name.startswith(("made_up_", "rlhf_file_")):
            del sys.modules[name]


def test_a_plugin_registers_and_is_listed(world: World) -> None:
    world.install("two", REGISTER.format(name="second"))
    world.install("one", REGISTER.format(name="first"), version="2.5")
    host, infos, said = world.load()
    assert [info.name for info in host.plugins] == ["one", "two"]
    assert infos["one"] == PluginInfo("one", "rlhf-one", "2.5", "loaded", None, {"policy loss": ["first"]})
    assert host.registry.names(POLICY_LOSS) == ["first", "second"]
    assert host.registry.owner(POLICY_LOSS, "first") == "rlhf-one 2.5"
    assert (said, host.registry.failures) == ([], [])


BROKEN = {
    "import": ("import not_there_at_all", "ModuleNotFoundError: No module named 'not_there_at_all'"),
    "halfway": (
        REGISTER.format(name="half") + "    raise KeyError('gone')",
        "made_up_rlhf_brk.py line 9). Uninstall",
    ),
    "late argument": (
        REGISTER.format(name="half") + "\n@hookimpl\ndef rlhf_stage_end(stage, result): ...",
        "rlhf_stage_end is not called with 'result'. Its arguments: stage, error",
    ),
}


@pytest.mark.parametrize("case", list(BROKEN))
def test_a_broken_plugin_is_a_warning_and_leaves_nothing(world: World, case: str) -> None:
    source, cause = BROKEN[case]
    world.install("a", REGISTER.format(name="before"))
    world.install("brk", source, version="0.3.0")
    world.install("z", REGISTER.format(name="after"))
    host, infos, said = world.load()
    assert host.registry.names(POLICY_LOSS) == ["after", "before"]
    info = infos["brk"]
    assert (info.state, info.distribution, info.version, info.components) == (
        "failed",
        "rlhf-brk",
        "0.3.0",
        {},
    )
    assert info.error is not None
    assert info.error.startswith("plugin 'brk' (from rlhf-brk 0.3.0) failed to load: ")
    assert cause in info.error
    assert info.error.endswith("Uninstall it or set RLHF_DISABLE_PLUGINS=brk.")
    assert said == [info.error]
    assert host.registry.failures == [info]
    assert {host.pm.get_name(plugin) for plugin in host.pm.get_plugins()} == {"a", "z"}
    host.hook.rlhf_stage_end(stage=None, error=None)
    with pytest.raises(InputError, match="failed to load"):
        host.registry.get(POLICY_LOSS, "half")


def test_an_optional_hook_may_be_unknown(world: World) -> None:
    source = "from rlhf_core import hookimpl\n@hookimpl(optionalhook=True)\ndef rlhf_of_the_future(x): ..."
    world.install("new", source)
    _, infos, said = world.load()
    assert (infos["new"].state, said) == ("loaded", [])


@pytest.mark.parametrize(
    ("requires", "state"),
    [
        ("rlhf-core>=0.1,<0.2", "loaded"),
        ("rlhf_core", "loaded"),
        ("rlhf-core>=0.2", "failed"),
        ("RLHF.Core<0.1", "failed"),
        ("rlhf-core>=9; extra == 'next'", "loaded"),
        ("rlhf-core>=9; python_version < '3'", "loaded"),
        ("other>=9", "loaded"),
        ("not a requirement", "loaded"),
    ],
)
def test_the_pin_on_core(world: World, requires: str, state: str) -> None:
    world.install("pin", REGISTER.format(name="pinned"), requires=requires)
    host, infos, _ = world.load()
    assert infos["pin"].state == state
    assert host.registry.names(POLICY_LOSS) == (["pinned"] if state == "loaded" else [])
    if state == "failed":
        assert "and 0.1.0 is installed; install versions that fit" in str(infos["pin"].error)
        assert "made_up_rlhf_pin" not in sys.modules


def test_two_owners_of_one_name(world: World) -> None:
    world.install("a", REGISTER.format(name="same"))
    world.install("b", REGISTER.format(name="same"), version="2.0")
    host, infos, said = world.load()
    assert (infos["a"].state, infos["b"].state) == ("loaded", "failed")
    assert len(said) == 1
    for part in (
        "policy loss 'same' is registered twice",
        "by rlhf-a 1.0",
        "by rlhf-b 2.0",
        "RLHF_DISABLE_PLUGINS=b",
    ):
        assert part in said[0]
    with pytest.raises(InputError, match=r"registered twice.*rlhf-a 1\.0.*rlhf-b 2\.0"):
        host.registry.get(POLICY_LOSS, "same")
    ((field, message),) = host.registry.check(POLICY_LOSS, "same", {})
    assert (field, "registered twice" in message) == ("name", True)


def test_two_distributions_of_one_entry_point(world: World) -> None:
    world.install("same", REGISTER.format(name="x"), distribution="rlhf-a")
    world.install("same", REGISTER.format(name="y"), distribution="rlhf-b")
    host, _, said = world.load()
    assert [info.state for info in host.plugins] == ["failed", "failed"]
    assert all(
        "rlhf-a 1.0 and rlhf-b 1.0 both have an entry point 'same'; uninstall one" in text for text in said
    )
    assert host.registry.names(POLICY_LOSS) == []


@pytest.mark.parametrize("names", ["brk", "rlhf-brk", " RLHF_Brk ,other", "other,brk"])
def test_disabled(world: World, monkeypatch: pytest.MonkeyPatch, names: str) -> None:
    world.install("brk", "raise ImportError")
    world.install("other", REGISTER.format(name="x"))
    monkeypatch.setenv("RLHF_DISABLE_PLUGINS", names)
    host, infos, said = world.load()
    assert infos["brk"] == PluginInfo("brk", "rlhf-brk", "1.0", "disabled")
    assert infos["other"].state == ("disabled" if "other" in names else "loaded")
    with pytest.raises(InputError, match=r"Left out by RLHF_DISABLE_PLUGINS: brk(, other)?\."):
        host.registry.get(POLICY_LOSS, "y")
    assert (said, host.registry.failures) == ([], [])


def test_disabling_what_is_not_there_warns(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.install("tanh", REGISTER.format(name="x"))
    monkeypatch.setenv("RLHF_DISABLE_PLUGINS", "tahn")
    _, infos, said = world.load()
    assert infos["tanh"].state == "loaded"
    assert said == ["RLHF_DISABLE_PLUGINS: no plugin is called 'tahn'. Did you mean 'tanh'?"]


# Components, as entry points of their kind

LOSSES = """
from rlhf_core import Kind

def loss(inputs, *, epsilon: float = 0.2): ...

VALUE_LOSS = Kind("value loss", ("inputs",))
OTHER = Kind("value loss")
"""


@pytest.fixture
def losses(world: World) -> World:
    """A module of a loss and of kinds, `made_up_losses`."""
    (world.site / "made_up_losses.py").write_text(LOSSES)
    return world


def points(group: str, *lines: str) -> str:
    return "\n".join((f"[{group}]", *lines, ""))


def test_a_component_is_imported_when_it_is_asked_for(losses: World) -> None:
    losses.install_points(
        "rlhf-one", points("rlhf.policy_loss", "first = made_up_losses:loss"), version="2.5"
    )
    host, infos, said = losses.load()
    assert infos["one"] == PluginInfo("one", "rlhf-one", "2.5", "loaded", None, {"policy loss": ["first"]})
    assert (said, versions()["rlhf-one"]) == ([], "2.5")
    assert host.registry.names(POLICY_LOSS) == ["first"]
    assert "made_up_losses" not in sys.modules
    assert host.registry.owner(POLICY_LOSS, "first") == "rlhf-one 2.5"
    assert host.registry.get(POLICY_LOSS, "first") is sys.modules["made_up_losses"].loss
    assert host.registry.options(POLICY_LOSS, "first") == ["epsilon"]


def test_a_distribution_may_have_hooks_and_components(losses: World) -> None:
    (losses.site / "made_up_hooks.py").write_text(REGISTER.format(name="by hook"))
    both = points("rlhf", "acme = made_up_hooks") + points("rlhf.policy_loss", "first = made_up_losses:loss")
    losses.install_points("rlhf-both", both)
    host, infos, said = losses.load()
    assert (list(infos), said) == (["acme"], [])
    assert infos["acme"].components == {"policy loss": ["by hook", "first"]}
    assert host.registry.owner(POLICY_LOSS, "first") == "rlhf-both 1.0"


def test_a_hook_that_fails_leaves_no_component_of_its_distribution(losses: World) -> None:
    (losses.site / "made_up_hooks.py").write_text("raise ValueError")
    both = points("rlhf", "acme = made_up_hooks") + points("rlhf.policy_loss", "first = made_up_losses:loss")
    losses.install_points("rlhf-both", both)
    host, infos, _ = losses.load()
    assert (infos["acme"].state, host.registry.names(POLICY_LOSS)) == ("failed", [])


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            points("rlhf.policy_los", "x = made_up_losses:loss"),
            "it has entry points 'rlhf.policy_los', and no kind is called 'policy los'. Did you mean 'policy loss'?",
        ),
        (
            points("rlhf.policy_loss", "x = made_up_losses"),
            "policy loss 'x': 'made_up_losses' is not module:name, such as my_package.losses:MyLoss",
        ),
        (
            points("rlhf.kind", "policy_loss = made_up_losses:VALUE_LOSS"),
            "another kind is called 'policy loss' too; rename one of the kinds",
        ),
    ],
    ids=["no such kind", "no text of a component", "a kind of core"],
)
def test_a_wrong_entry_point_is_a_warning(losses: World, text: str, cause: str) -> None:
    losses.install_points("rlhf-wrong", points("rlhf.reward", "r = made_up_losses:loss") + text)
    losses.install("other", REGISTER.format(name="mine"))
    host, infos, said = losses.load()
    assert (infos["wrong"].state, infos["other"].state) == ("failed", "loaded")
    assert said == [infos["wrong"].error]
    assert said[0].startswith(f"plugin 'wrong' (from rlhf-wrong 1.0) failed to load: {cause}")
    assert said[0].endswith("Uninstall it or set RLHF_DISABLE_PLUGINS=wrong.")
    assert ("A package names a kind of its own in the group 'rlhf.kind'." in said[0]) == ("no kind" in cause)
    with pytest.raises(InputError, match=r"no reward named 'r'.*plugin 'wrong'"):
        host.registry.get(REWARD, "r")


def test_the_pin_of_components(losses: World) -> None:
    first = points("rlhf.policy_loss", "first = made_up_losses:loss")
    losses.install_points("rlhf-one", first, requires="rlhf-core>=0.2")
    host, infos, said = losses.load()
    assert (infos["one"].state, host.registry.names(POLICY_LOSS)) == ("failed", [])
    assert "it needs rlhf-core >=0.2, and 0.1.0 is installed" in said[0]


def test_a_kind_of_a_distribution(losses: World) -> None:
    """Another distribution, which is read first, may add to it; neither is imported."""
    losses.install_points("rlhf-values", points("rlhf.kind", "value_loss = made_up_losses:VALUE_LOSS"))
    losses.install_points("rlhf-mse", points("rlhf.value_loss", "mse = made_up_losses:loss"))
    host, infos, said = losses.load()
    assert (said, infos["values"].components) == ([], {})
    assert infos["mse"].components == {"value loss": ["mse"]}
    assert "made_up_losses" not in sys.modules
    from made_up_losses import OTHER, VALUE_LOSS  # type: ignore[import-not-found]

    assert [kind.name for kind in host.registry.kinds()] == ["value loss"]
    assert host.registry.get(VALUE_LOSS, "mse") is sys.modules["made_up_losses"].loss
    for ask in (host.registry.names, lambda kind: host.registry.get(kind, "mse")):
        with pytest.raises(InputError, match="another kind is called 'value loss' too"):
            ask(OTHER)
    with pytest.raises(InputError, match="another kind is called 'value loss' too"):
        host.registry.add(OTHER, "huber", lambda inputs: inputs)


def test_a_hook_may_add_to_a_kind_before_that_is_declared(losses: World) -> None:
    losses.install("huber", "from made_up_losses import VALUE_LOSS as POLICY_LOSS\n" + ADDS.format(name="x"))
    declared = points("rlhf.kind", "value_loss = made_up_losses:VALUE_LOSS")
    losses.install_points("rlhf-values", declared + points("rlhf.value_loss", "mse = made_up_losses:loss"))
    host, infos, said = losses.load()
    assert infos["huber"].components == {"value loss": ["x"]}
    assert infos["values"].components == {"value loss": ["mse"]}
    assert host.registry.names(sys.modules["made_up_losses"].VALUE_LOSS) == ["mse", "x"]
    assert said == []


def test_two_distributions_of_one_kind(losses: World) -> None:
    declared = points("rlhf.kind", "value_loss = made_up_losses:VALUE_LOSS")
    losses.install_points("rlhf-a", declared)
    losses.install_points("rlhf-b", declared)
    _, infos, said = losses.load()
    assert (infos["a"].state, infos["b"].state, len(said)) == ("loaded", "failed", 1)
    assert "from rlhf-b 1.0) failed to load: another kind of rlhf-a 1.0 is called 'value loss' too" in said[0]


def test_a_kind_that_is_none(losses: World) -> None:
    losses.install_points("rlhf-values", points("rlhf.kind", "value_loss = made_up_losses:loss"))
    host, _, _ = losses.load()
    with pytest.raises(
        InputError, match=r"kind 'value loss' \(from rlhf-values 1\.0\): made_up_losses:loss is not a kind"
    ):
        host.registry.get(Kind("value loss"), "mse")


# Files and objects


def test_a_file(world: World, tmp_path: Path) -> None:
    file = tmp_path / "my_loss.py"
    file.write_text(REGISTER.format(name="mine"))
    host, infos, _ = world.load(files=[file])
    assert infos[str(file)] == PluginInfo(str(file), None, None, "loaded", None, {"policy loss": ["mine"]})
    assert host.registry.get(POLICY_LOSS, "mine") is not None


def test_objects_are_notified_and_may_take_fewer_arguments(world: World) -> None:
    class Watch:
        def __init__(self) -> None:
            self.seen: list[Any] = []

        @hookimpl
        def rlhf_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
            self.seen.append((step, metrics["loss"]))

        @hookimpl
        def rlhf_register(self, registry: Registry) -> None:
            registry.add(ADVANTAGE, f"of {id(self)}", lambda inputs: inputs)

    one, two = Watch(), Watch()
    host, _, _ = world.load(objects=[one, two])
    host.hook.rlhf_step_end(stage=None, step=3, metrics={"loss": 0.5})
    assert one.seen == two.seen == [(3, 0.5)]
    assert len(host.registry.names(ADVANTAGE)) == 2


def test_an_object_that_comes_late_is_registered_too(world: World) -> None:
    host, _, _ = world.load()
    module = types.ModuleType("late")
    exec(REGISTER.format(name="late"), vars(module))
    host.pm.register(module)
    assert host.registry.names(POLICY_LOSS) == ["late"]


def test_a_lazy_attribute_is_left_alone(world: World) -> None:
    source = REGISTER.format(name="lazy") + (
        "\ndef __getattr__(name): raise RuntimeError('resolved ' + name)\n"
        "def __dir__(): return [*globals(), 'RewardTrainer', 'rlhf_like_name']\n"
    )
    world.install("lazy", source)
    _, infos, said = world.load()
    assert (infos["lazy"].state, said) == ("loaded", [])


def test_loading_twice_gives_two_registries(world: World) -> None:
    world.install("a", REGISTER.format(name="x"))
    (first, _, _), (second, _, _) = world.load(), world.load()
    first.registry.add(POLICY_LOSS, "only here", lambda inputs: inputs)
    assert second.registry.names(POLICY_LOSS) == ["x"]


def test_a_distribution_that_has_lost_its_metadata_fails_alone(world: World) -> None:
    world.install("gone", REGISTER.format(name="gone"))
    world.install("mine", REGISTER.format(name="mine"))
    (world.site / "rlhf_gone-1.0.dist-info" / "METADATA").unlink()
    (world.site / "gone.py").unlink(missing_ok=True)
    _, infos, _ = world.load()
    assert infos["mine"].state == "loaded"
    assert "rlhf-gone" not in versions()
    assert versions()["rlhf-mine"] == "1.0"


def test_entry_points_are_read_once_for_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for every update: a look opens files of every installed distribution."""
    read: list[str] = []

    def entry_points() -> Any:
        read.append("all")
        return importlib.metadata.EntryPoints()

    monkeypatch.setattr(distributions, "entry_points", entry_points)
    for name in ("first", "second"):
        monkeypatch.syspath_prepend(tmp_path / name)
        for group in ("rlhf.urls", "rlhf.commands", "rlhf.urls"):
            distributions.find_points(group)
    assert read == ["all"] * 2


def test_devices_elsewhere_need_a_distribution_that_compiles_for_them(
    place: Any, rlhf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_DISABLE_PLUGINS", "topologies")
    ended = rlhf("check", "rm.toml", "--on", "h100:8")
    assert ended.code == 2
    assert "pip install rlhf-topologies" in ended.message


def test_the_plugins_of_the_suite_are_listed_without_importing_them() -> None:
    """Only what translates names, and the hook of `--on`, is imported; the rest when a component is asked for."""
    code = "import sys; from rlhf_core import plugins; plugins.load(); print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = ended.stdout.split()
    suite = {name.partition(".")[0] for name in modules if name.startswith("rlhf_")}
    assert suite == {"rlhf_core", "rlhf_compat", "rlhf_topologies"}
    assert not {"rlhf_core.models", "rlhf_core.data", "jax", "flax", "optax"} & {*modules}


def test_a_config_without_any_distribution_names_a_typo(world: World) -> None:
    """As where the source is on the path and nothing is installed."""
    with pytest.raises(InputError, match="Did you mean 'learning_rate'"):
        TrainerConfig(lerning_rate=1e-3)
