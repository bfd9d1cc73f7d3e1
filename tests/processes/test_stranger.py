"""Two strangers' packages, installed for real: one that works and one that does not.

Without an installation: tests/plugins.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.shared import packages

LIST = """
import json, warnings
from rlhf_core import POLICY_LOSS, plugins
from rlhf_core.errors import InputError

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    host = plugins.load()
try:
    host.registry.get(POLICY_LOSS, "no_such_loss")
    missing = ""
except InputError as error:
    missing = str(error)
print(json.dumps({
    "plugins": {
        p.name: [p.distribution, p.version, p.state, p.error, dict(p.components)] for p in host.plugins
    },
    "warnings": [str(w.message) for w in caught if issubclass(w.category, plugins.PluginWarning)],
    "missing": missing,
}))
"""
LOSS = """
import jax.numpy as jnp, numpy as np
from rlhf_core import POLICY_LOSS, PolicyInputs, plugins
from rlhf_core.errors import InputError

registry = plugins.load().registry
one = jnp.ones((1, 2))
out = registry.get(POLICY_LOSS, "tanh", temperature=2.0)(PolicyInputs(one * 0.5, one * 0.25, one * 3.0, one))
np.testing.assert_allclose(out.loss, np.full((1, 2), -3 * np.tanh(2 * (np.exp(0.25) - 1))), rtol=1e-6)
print([message for options in ({"temprature": 1.0}, {"temperature": "hot"}, {"temperature": 0.0})
       for _, message in registry.check(POLICY_LOSS, "tanh", options)])
"""


@pytest.fixture(scope="module")
def installed(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with both packages, as pip installs them."""
    work, target = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("site")
    sources = [repository / "examples/plugins/rlhf-tanh-loss", Path(__file__).parent / "rlhf-broken"]
    found: Path = packages.install(sources, work, target)
    return found


def python(code: str, installed: Path, **environment: str) -> str:
    said: str = packages.python(installed, "-c", code, **environment)
    return said


@pytest.mark.long
def test_the_working_package_works_beside_the_broken_one(installed: Path) -> None:
    """Which is a warning with its cause and a way out."""
    found = json.loads(python(LIST, installed))
    states = {name: plugin[2] for name, plugin in found["plugins"].items()}
    assert {name for name, state in states.items() if state != "loaded"} == {"brk"}
    assert {"core", "sft", "reward", "grpo"} <= states.keys()
    working = ["rlhf-tanh-loss", "0.1.0", "loaded", None, {"policy loss": ["tanh"]}]
    assert found["plugins"]["tanh-loss"] == working
    distribution, version, state, error, components = found["plugins"]["brk"]
    assert (distribution, version, state, components) == ("rlhf-broken", "0.3.0", "failed", {})
    for part in (
        "No module named 'no_such_library_for_rlhf'",
        "rlhf-broken 0.3.0",
        "RLHF_DISABLE_PLUGINS=brk",
    ):
        assert part in error
    assert found["warnings"].count(error) == 1
    assert found["missing"].startswith("no policy loss named 'no_such_loss'. Installed: ")
    assert "tanh" in found["missing"].split("Installed: ")[1].split(".")[0].split(", ")
    assert "no_such_library_for_rlhf" in found["missing"]


@pytest.mark.long
def test_the_loss_computes_and_its_options_are_checked(installed: Path) -> None:
    problems = python(LOSS, installed)
    assert "Did you mean 'temperature'?" in problems
    assert "expected a number, got 'hot'" in problems
    assert "temperature must be above 0, got 0.0" in problems


@pytest.mark.long
def test_a_version_outside_the_pin_fails_alone(installed: Path, tmp_path: Path) -> None:
    """The metadata is a wheel's; what is made up is in tests/packages/plugins."""
    site = shutil.copytree(installed, tmp_path / "site")
    (metadata,) = site.glob("rlhf_tanh_loss-*.dist-info/METADATA")
    text = metadata.read_text()
    assert "Requires-Dist: rlhf-core<0.2,>=0.1" in text
    metadata.write_text(text.replace("rlhf-core<0.2,>=0.1", "rlhf-core<9,>=8"))
    found = json.loads(python(LIST, site, RLHF_DISABLE_PLUGINS="brk"))
    assert found["plugins"]["brk"][2:] == ["disabled", None, {}]
    assert found["plugins"]["tanh-loss"][2] == "failed"
    assert "it needs rlhf-core <9,>=8, and 0.1.0 is installed" in found["plugins"]["tanh-loss"][3]
    assert found["plugins"]["sft"][2] == "loaded"


def test_naming_and_configuring_need_no_jax(tmp_path: Path) -> None:
    python(
        "import sys, rlhf_core\n"
        "from rlhf_core import config, contracts, plugins, stage, errors\n"
        "from rlhf_core import hookimpl, TrainerConfig, Registry, POLICY_LOSS, PolicyInputs\n"
        "assert not {'jax', 'flax', 'optax', 'transformers', 'datasets', 'wandb'} & set(sys.modules)",
        tmp_path,
    )
