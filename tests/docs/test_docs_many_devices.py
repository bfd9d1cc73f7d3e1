"""docs/how-to/many_devices.md: its meshes train, and each of its recipes starts processes that find each other.

tests/processes runs the recipes with the real launchers.
"""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import jax
import pytest
import yaml
from rlhf_topologies import check, chips, interpreters

from rlhf_core import runtime
from rlhf_core.sampling import SamplingOptions
from tests.shared import documents, processes

PAGE = documents.REPOSITORY / "docs/how-to/many_devices.md"
SHOWN = {name: text for _, text in documents.blocks(PAGE) if (name := documents.named(text))}
BEFORE_RENTING = (
    PAGE.read_text(encoding="utf-8").partition("\n## Check before renting\n")[2].partition("\n## ")[0]
)
LAUNCH = documents.REPOSITORY / "examples/launch"
FILES = {path.name: path.read_text(encoding="utf-8") for path in LAUNCH.iterdir() if path.is_file()}

JOIN = """#!{python}
import os, sys
from rlhf_core import runtime
runtime.prepare()
import jax
said = " ".join([f"process {{jax.process_index()}} of {{jax.process_count()}}:", *sys.argv[1:]])
os.write(1, (said + "\\n").encode())  # in one piece: both processes write to one pipe
"""
STUBS = {
    # What the launchers do, on this machine alone; quoting is theirs too.
    "ssh": '#!/bin/bash\nshift\nexec bash -c "$*"\n',
    "gcloud": """#!/bin/bash
[ "$4" = describe ] && exec echo 127.0.0.1
command=${@: -1}
exec bash -c "${command#--command=}"
""",
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory `project`, and the launchers' commands."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "project").mkdir()
    (tmp_path / "bin").mkdir()
    for name, text in {**STUBS, "rlhf": JOIN.format(python=sys.executable)}.items():
        command = tmp_path / "bin" / name
        command.write_text(text)
        command.chmod(command.stat().st_mode | stat.S_IXUSR)
    return tmp_path


def start(command: list[str], place: Path, **environment: str) -> subprocess.Popen[str]:
    kept = {key: x for key, x in os.environ.items() if not key.startswith("JAX_NUM_CPU")}
    path = f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        command,
        cwd=place,
        env={**kept, "PATH": path, "JAX_PLATFORMS": "cpu", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def found_each_other(*jobs: subprocess.Popen[str]) -> None:
    said = "".join(job.communicate(timeout=300)[0] for job in jobs)
    for i in range(2):
        assert f"process {i} of 2: run pipeline.toml" in said, said


def test_the_page_shows_the_files() -> None:
    assert {name: text for name, text in SHOWN.items() if name != "pipeline.toml"} == {
        name: FILES[name] for name in SHOWN if name != "pipeline.toml"
    }
    pages = [PAGE, PAGE.with_name("serve.md"), PAGE.with_name("engines.md")]
    targets = [target for page in pages for target in documents.links(page)]
    linked = {Path(target).name for target in targets if "examples/launch/" in target}
    assert linked == set(FILES)


@pytest.mark.parametrize("file", sorted(name for name in FILES if name.endswith((".sh", ".sbatch", ".py"))))
def test_files_parse(file: str) -> None:
    """Files with wrong syntax would be an error."""
    if file.endswith(".py"):
        compile(FILES[file], file, "exec")
    else:
        subprocess.run(["bash", "-n", LAUNCH / file], check=True)


@pytest.mark.parametrize(
    ("file", "host"), [("hosts.sh", "node"), pytest.param("tpu.sh", "nothing", marks=pytest.mark.long)]
)
def test_scripts(file: str, host: str, place: Path) -> None:
    """The coordinator is this machine, on a free port; `found_each_other` has the assertions."""
    text = (
        FILES[file]
        .replace("8476", str(processes.free_port()))
        .replace(f"({host}1 {host}2)", "(127.0.0.1 127.0.0.1)")
    )
    text = text.replace("/path/to/venv/bin/", f"{place}/bin/")
    (place / file).write_text(text)
    found_each_other(start(["bash", file], place))


@pytest.mark.parametrize("file", ["hosts.sh", "tpu.sh"])
@pytest.mark.parametrize(
    ("codes", "told"),
    [((0, 0), 0), ((75, 0), 75), ((75, 75), 75), ((75, 1), 1), ((255, 75), 1), ((1, 2), 2), ((2, 75), 2)],
)
def test_scripts_end_with_the_most_telling_code(
    file: str, codes: tuple[int, int], told: int, place: Path
) -> None:
    command = place / "bin" / "rlhf"
    command.write_text(f"#!/bin/bash\ncodes={codes}\nexit ${{codes[JAX_PROCESS_ID]}}\n".replace(",", ""))
    (place / file).write_text(FILES[file].replace("/path/to/venv/bin/", f"{place}/bin/"))
    job = start(["bash", file], place)
    said, _ = job.communicate(timeout=60)
    assert job.returncode == told, said


@pytest.mark.parametrize("file", ["hosts.sh", pytest.param("tpu.sh", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(each, marks=pytest.mark.long) for each in (signal.SIGINT, signal.SIGHUP)),
    ],
)
def test_scripts_stop_the_processes_and_wait_for_them(file: str, number: int, place: Path) -> None:
    command = place / "bin" / "rlhf"
    command.write_text(
        "#!/bin/bash\n"
        "trap 'sleep 0.5; echo saved; exit 75' TERM\n"
        "echo started\n"
        "for i in {1..600}; do sleep 0.1; done\n"
    )
    (place / file).write_text(FILES[file].replace("/path/to/venv/bin/", f"{place}/bin/"))
    job = start(["bash", file], place)
    assert job.stdout is not None
    assert [job.stdout.readline() for _ in range(2)] == ["started\n"] * 2
    job.send_signal(number)
    said, _ = job.communicate(timeout=60)
    assert job.returncode == 75, said
    assert said.count("saved") == 2


def test_kubernetes_starts_a_stopped_job_again_and_not_one_of_bad_input() -> None:
    _, job = yaml.safe_load_all(FILES["job.yaml"])
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # else the API refuses the policy
    assert pod["terminationGracePeriodSeconds"] > 30
    rules = job["spec"]["podFailurePolicy"]["rules"]
    (name,) = (container["name"] for container in pod["containers"])
    actions = {
        code: rule["action"]
        for rule in rules
        if (exits := rule.get("onExitCodes")) and (exits["operator"], exits["containerName"]) == ("In", name)
        for code in exits["values"]
    }
    assert actions == {2: "FailJob", 75: "Ignore"}


@pytest.mark.long
def test_kubernetes(place: Path) -> None:
    service, job = yaml.safe_load_all(FILES["job.yaml"])
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    given = {each["name"]: each.get("value") for each in container["env"]}
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(given["JAX_NUM_PROCESSES"])
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    host = given.pop("JAX_COORDINATOR_ADDRESS").partition(":")[0]
    assert (
        host == f"{job['metadata']['name']}-0.{pod['subdomain']}" == f"rlhf-0.{service['metadata']['name']}"
    )
    assert given.pop("JAX_PROCESS_ID") is None  # from the pod's annotation
    address = f"127.0.0.1:{processes.free_port()}"
    # As in a pod, and without the package that JAX would ask.
    inside = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "JAX_COORDINATOR_ADDRESS": address, **given}
    jobs = [
        start(container["command"], place, **inside, JAX_PROCESS_ID=str(i), JOB_COMPLETION_INDEX=str(i))
        for i in range(spec["completions"])
    ]
    found_each_other(*jobs)


@pytest.mark.long
def test_the_meshes_train(tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.make_model().save(tmp_path / "MODEL")
    tiny.write_rows(tmp_path / "corpus.jsonl", tiny.texts(16))
    other, sampled = documents.stage_tables(PAGE)
    assert SamplingOptions(**sampled["sampling"]).mesh.tensor == 4
    default = "{ data = -1, fsdp = 1, tensor = 1 }"
    changed = SHOWN["pipeline.toml"].replace(default, "{ data = 1, fsdp = 4, tensor = 2 }")
    assert tomllib.loads(changed)["mesh"] == other["mesh"]
    Path("pipeline.toml").write_text(SHOWN["pipeline.toml"])
    Path("other.toml").write_text(changed)
    said = "\n".join(text for language, text in documents.blocks(PAGE) if language == "console")
    # Launchers are in tests/processes.
    first, pretended = [line for line in documents.commands(said) if "rlhf run " in line]
    assert pretended.endswith(f"{first} --dir runs/eight")  # which is the same, and run once
    for line in (pretended, "rlhf run other.toml --dir other"):
        arguments = line[line.index("rlhf ") :].split()[1:]
        ended = documents.rlhf([*arguments, "--set", "base.max_training_steps=1"])  # on eight devices
        assert ended.code == 0, ended.said


def test_every_name_is_read_and_every_chip_is_named() -> None:
    rows = BEFORE_RENTING.partition("### Names of devices")[2].partition("### ")[0]
    names = re.findall(r"`(\w+:[\dx]+)`", rows)
    assert len(names) == 6
    assert all(chips.parse(name).name == name for name in names)
    assert set(chips.CHIPS) == {
        name.partition(":")[0] for name in re.findall(r"`([a-z]\d\w+(?::[\dx]+)?)`", rows)
    }


def test_columns_are_explained() -> None:
    explained = re.findall(r"^\| ([\w ]+) \| ", BEFORE_RENTING.partition("| column |")[2], re.MULTILINE)
    assert explained == list(check.COLUMNS[1:])
    assert f"{chips.USABLE:.0%}".replace("%", " %") in BEFORE_RENTING


def test_the_error_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RLHF_GPU_PYTHON", raising=False)
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path))
    with pytest.raises(interpreters.InputError) as error:
        interpreters.find(chips.parse("h100:8"))
    (shown,) = (text for language, text in documents.blocks(PAGE) if "--on h100:8: XLA's" in text)
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    said = str(error.value).replace(str(runtime.cache_root()), "~/.cache/rlhf")
    said = said.replace(python, "python3.11").replace(jax.__version__, "0.10.2")
    assert shown.split() == said.split()


def test_the_table_is_that_of_the_program() -> None:
    """It is a real output; its heading is what is printed now."""
    (heading,) = re.findall(r"^program +per update.*$", BEFORE_RENTING, re.MULTILINE)
    assert re.split(r" {2,}", heading) == list(check.COLUMNS)
