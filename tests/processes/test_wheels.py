"""The wheels of all distributions: what is in them, and how they work in an environment without the repository."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from email import message_from_bytes
from email.message import Message
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from rlhf_testing import tokenizer

from rlhf_core.plugins import load_file

REPOSITORY = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = {"rlhf_core": "."} | {
    f"rlhf_{path.parent.name}": str(path.parent.relative_to(REPOSITORY))
    for path in sorted(REPOSITORY.glob("plugins/*/pyproject.toml"))
    if path.parent.name != "verifiers"  # installed by itself
}
"""{package: directory}; a distribution is called as its package, with "-"."""

BUILD = """
import os, sys, tarfile
from pathlib import Path
from hatchling.build import build_sdist, build_wheel
out, *directories = map(Path, sys.argv[1:])
for directory in directories:
    os.chdir(directory)
    source = build_sdist(str(out / "sources"))
    with tarfile.open(out / "sources" / source) as archive:
        archive.extractall(out / "sources", filter="data")
    os.chdir(out / "sources" / source.removesuffix(".tar.gz"))
    build_wheel(str(out / "wheels"))
"""


def command(
    arguments: Sequence[str | Path], cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RLHF_"))}
    return subprocess.run(
        list(map(str, arguments)),
        cwd=cwd,
        env={**kept, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def wheels(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, zipfile.ZipFile]:
    """{package: its wheel}, built with the installed hatchling from its source distribution."""
    out = tmp_path_factory.mktemp("wheels")
    done = command([sys.executable, "-c", BUILD, out, *(repository / d for d in DISTRIBUTIONS.values())], out)
    assert done.returncode == 0, done.stdout + done.stderr
    out = out / "wheels"
    assert len(list(out.iterdir())) == len(DISTRIBUTIONS)
    return {package: zipfile.ZipFile(next(out.glob(f"{package}-*.whl"))) for package in DISTRIBUTIONS}


@pytest.fixture(scope="module")
def environment(wheels: dict[str, zipfile.ZipFile], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheels, and with every library of ours but what is installed from the repository."""
    place, libraries = tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("libraries")
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if path.suffix != ".pth" and "rlhf" not in path.name:
            (libraries / path.name).symlink_to(path)
    made = command([sys.executable, "-m", "venv", "--without-pip", place], place)
    assert made.returncode == 0, made.stderr
    (site,) = place.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(f"{libraries}\n")
    install = pip(place, "install", "--no-deps", "--no-index", *(str(w.filename) for w in wheels.values()))
    assert install.returncode == 0, install.stderr
    return place


def pip(environment: Path, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    front = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        environment / "bin/python",
        "--disable-pip-version-check",
    ]
    return command([*front, verb, *arguments], environment)


def metadata(wheel: zipfile.ZipFile, name: str) -> bytes:
    (path,) = [each for each in wheel.namelist() if each.endswith(f".dist-info/{name}")]
    return wheel.read(path)


@pytest.mark.parametrize("package", DISTRIBUTIONS)
def test_a_wheel_has_every_file_of_its_package(
    package: str, wheels: dict[str, zipfile.ZipFile], repository: Path
) -> None:
    root = repository / DISTRIBUTIONS[package]
    options = ("--cached", "--others", "--exclude-standard")
    listed = command(["git", "ls-files", *options, "--", package], root)
    if listed.returncode:
        pytest.skip("not a git repository, so nothing says which files belong to a package")
    wanted = {name for name in listed.stdout.splitlines() if (root / name).is_file()}
    assert {f"{package}/__init__.py", f"{package}/py.typed"} <= wanted or package == "rlhf_suite"
    assert {name for name in wheels[package].namelist() if ".dist-info/" not in name} == wanted


LIBRARIES = {
    "rlhf_report": ["rich>=14.0", "rlhf-http", "starlette>=1.0"],
    "rlhf_http": ["httptools>=0.6.3", "starlette>=1.0", "uvicorn>=0.40"],
    "rlhf_remote": ["httpx>=0.27", "jsonschema>=4.23", "rlhf-http"],
    "rlhf_serve": ["prometheus-client>=0.22", "rlhf-http", "starlette>=1.0"],
}
"""{package: what it needs besides core}; distributions of ours are of the same version."""


@pytest.mark.parametrize("package", DISTRIBUTIONS)
def test_its_metadata(package: str, wheels: dict[str, zipfile.ZipFile], repository: Path) -> None:
    """The source distribution was built without the hook of the repository."""
    said: Message = message_from_bytes(metadata(wheels[package], "METADATA"))
    project = tomllib.loads((repository / DISTRIBUTIONS[package] / "pyproject.toml").read_text())["project"]
    assert (said["Name"], said["Version"]) == (package.replace("_", "-"), version("rlhf-core"))
    assert (said["Requires-Python"], said["License-Expression"]) == (">=3.11", "Apache-2.0")
    assert metadata(wheels[package], "licenses/LICENSE") == (repository / "LICENSE").read_bytes()
    assert "Typing :: Typed" in said.get_all("Classifier", ())
    hook = load_file(repository / "hatch_build.py")
    assert {
        line.partition(", ")[2].startswith(hook.REPOSITORY) for line in said.get_all("Project-URL", ())
    } == {True}
    readme = (repository / DISTRIBUTIONS[package] / "README.md").read_text()
    text = metadata(wheels[package], "METADATA").decode()
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", readme):  # links lead to the repository
        path = os.path.relpath((repository / DISTRIBUTIONS[package] / target).resolve(), repository)
        readme = readme.replace(
            f"]({target}", f"]({hook.REPOSITORY}/{'raw' if '.png' in path else 'blob'}/main/{path}"
        )
    assert text.strip().endswith(readme.strip())
    required = [each for each in said.get_all("Requires-Dist", ()) if "extra ==" not in each]
    if package == "rlhf_suite":
        others = {name.replace("_", "-") for name in DISTRIBUTIONS} - {"rlhf-suite"}
        extras = {"rlhf-trackers": "rlhf-trackers[wandb]"}
        assert set(required) == {f"{extras.get(name, name)}=={version('rlhf-core')}" for name in others}
        return
    if "entry-points" not in project and package != "rlhf_core":
        assert package == "rlhf_http"  # a library
        project["entry-points"] = {}
        points = ""
    else:
        points = metadata(wheels[package], "entry_points.txt").decode()
    for group, named in project["entry-points"].items():
        assert all(f"{name} = {module}\n" in points for name, module in named.items())
        assert f"[{group}]\n" in points
    if package == "rlhf_core":
        assert "[console_scripts]\nrlhf = rlhf_core.cli:main\n" in points
    else:  # a plugin needs core of its own version, and no other plugin but libraries
        needed = ["rlhf-core", *LIBRARIES.get(package, ())]
        of_ours = {name for name in needed if name.startswith("rlhf-")}
        expected = [f"{each}=={version('rlhf-core')}" if each in of_ours else each for each in needed]
        assert sorted(required) == sorted(expected)


DEMONSTRATIONS = """
dir = "alone"
[[stage]]
name = "base"
trainer = "sft"
model = { model_type = "llama", hidden_size = 8, num_hidden_layers = 1, num_attention_heads = 1, \
intermediate_size = 8, tokenizer = "tokenizer" }
train_data = "texts.jsonl"
total_batch_size = 1
max_training_steps = 1
"""
PIPELINE = """
[[stage]]
name = "base"
trainer = "sft"
model = "model"
train_data = "texts.jsonl"
[[stage]]
name = "policy"
trainer = "grpo"
model = "base.model"
train_data = "prompts.jsonl"
rewards = ["length"]
"""


@pytest.mark.long
def test_wheels_work_outside_the_repository_and_without_one_of_them(
    environment: Path, tmp_path: Path
) -> None:
    rlhf = environment / "bin/rlhf"
    found = command(
        [environment / "bin/python", "-c", "import rlhf_core; print(rlhf_core.__file__)"], tmp_path
    )
    assert Path(found.stdout.strip()).is_relative_to(environment), found.stdout + found.stderr
    listed = command([rlhf, "plugins"], tmp_path, COLUMNS="160")
    assert (listed.returncode, listed.stderr) == (0, "")
    registering = set(DISTRIBUTIONS) - {"rlhf_suite", "rlhf_http"}
    assert all(package.replace("_", "-") in listed.stdout for package in registering)
    written = command([rlhf, "new", "reward", "concise"], tmp_path)
    assert (written.returncode, written.stderr) == (0, "")
    assert (tmp_path / "rlhf-concise/pyproject.toml").is_file()

    removed = pip(environment, "uninstall", "--yes", "rlhf-grpo")
    assert removed.returncode == 0, removed.stderr
    (tmp_path / "pipeline.toml").write_text('dir = "run"\n' + PIPELINE)
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "model").mkdir()
    for verb in ("check", "run"):
        refused = command([rlhf, verb, "pipeline.toml"], tmp_path)
        assert refused.returncode == 2
        assert refused.stderr.splitlines() == [
            "stage 'policy'.trainer: no trainer named 'grpo'. Installed: distill, dpo, kto, online_dpo, reward, sft. "
            "Install the package that has it (pip install rlhf-grpo), or give its file with --plugin."
        ]
    assert not (tmp_path / "run").exists()


SCORE = """
from rlhf_core import load_model
model = load_model("alone/base/artifacts/model")
print(model.logits([[3, 4]], [[1, 1]]).shape)
"""


@pytest.mark.long
def test_core_and_one_trainer_need_nothing_that_only_other_packages_need(
    wheels: dict[str, zipfile.ZipFile], tmp_path: Path
) -> None:
    """A llama is trained, evaluated, trained on and opened beside the libraries that core's metadata names."""
    place, libraries, work = (tmp_path / name for name in ("environment", "libraries", "work"))
    for directory in (place, libraries, work):
        directory.mkdir()
    required = message_from_bytes(metadata(wheels["rlhf_core"], "METADATA")).get_all("Requires-Dist", ())
    names = needed(required)
    assert not {"wandb", "uvicorn", "starlette", "tensorboardx", "math-verify"} & names
    for name in names:
        for file in distribution(name).files or ():
            top = Path(sysconfig.get_paths()["purelib"]) / file.parts[0]
            if file.parts[0] != ".." and not (libraries / top.name).exists():
                (libraries / top.name).symlink_to(top)
    command([sys.executable, "-m", "venv", "--without-pip", place], place)
    (site,) = place.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(f"{libraries}\n")
    install = pip(
        place,
        "install",
        "--no-deps",
        "--no-index",
        *(str(wheels[name].filename) for name in ("rlhf_core", "rlhf_sft")),
    )
    assert install.returncode == 0, install.stderr

    rlhf = place / "bin/rlhf"
    tokenizer().save_pretrained(work / "tokenizer")
    (work / "texts.jsonl").write_text('{"text": "a b"}\n')
    for steps in (1, 2):
        pipeline = DEMONSTRATIONS.replace("max_training_steps = 1", f"max_training_steps = {steps}")
        (work / "pipeline.toml").write_text(pipeline + 'eval_data = "texts.jsonl"\nlog_steps = 1\n')
        ran = command([rlhf, "run", "pipeline.toml"], work)
        assert ran.returncode == 0, ran.stderr
    assert "is trained further" in ran.stdout + ran.stderr
    rows = [json.loads(line) for line in (work / "alone/base/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]
    assert any("eval_loss" in row for row in rows)
    opened = command([place / "bin/python", "-c", SCORE], work)
    assert opened.stdout.startswith("(1, 2, "), opened.stderr

    commands = {
        "report alone": "rlhf-report",
        "new reward x": "rlhf-testing",
        "generate alone": "rlhf-remote",
    }
    for words, package in commands.items():
        refused = command([rlhf, *words.split()], work)
        assert refused.returncode == 2
        assert refused.stderr == f"rlhf {words.split()[0]}: not installed; type: pip install {package}\n"
    door = command([place / "bin/python", "-c", "import rlhf_core.testing"], work)
    assert "ImportError: rlhf_core.testing needs rlhf-testing; type: pip install rlhf-testing" in door.stderr
    (work / "pipeline.toml").write_text(DEMONSTRATIONS.replace('"alone"', '"other"') + 'logger = ["wandb"]\n')
    refused = command([rlhf, "check", "pipeline.toml"], work)
    assert refused.returncode == 2
    assert "pip install 'rlhf-trackers[wandb]'" in refused.stderr


def needed(requirements: Iterable[str]) -> set[str]:
    """Return the distributions that requirements need, and theirs, of those that are installed here."""
    found: set[str] = set()
    todo = list(requirements)
    while todo:
        requirement = Requirement(todo.pop())
        name = requirement.name.lower().replace("_", "-")
        extras = ("", *requirement.extras)
        wanted = requirement.marker is None or any(
            requirement.marker.evaluate({"extra": each}) for each in extras
        )
        if name in found or not wanted:
            continue
        try:
            todo += distribution(name).requires or []
        except PackageNotFoundError:  # of another platform
            continue
        found.add(name)
    return found
