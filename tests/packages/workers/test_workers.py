"""Worker processes: how they end, which signals reach them, and what they leave behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import HIDDEN, remember
from rlhf_core.errors import InputError
from rlhf_core.plugins import load_file
from rlhf_core.workers import pool as workers
from rlhf_core.workers.event_loop import run_async
from rlhf_core.workers.pickling import UnsendableError

FUNCTIONS = """
import asyncio, os, re, signal, sys, threading, time
from pathlib import Path

from rlhf_core.errors import InputError

LOCK = threading.Lock()

def work(what, x=None):
    if what == "where":
        return os.getpid(), os.getsid(0), "jax" in sys.modules, LOCK.locked(), sorted(os.listdir("/proc/self/fd"))
    if what == "spin":
        while True:
            pass
    if what == "regex":
        return re.fullmatch("(a+)+b", "a" * 40)
    if what == "sleep":
        time.sleep(x)
    if what == "kill":
        os.kill(os.getpid(), x)
    if what == "kill once":
        if not Path(x).exists():
            Path(x).write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
    if what == "grow":
        return len(bytearray(x))
    if what == "raise":
        raise KeyError("gold")
    if what == "tell":
        import warnings
        warnings.warn(f"{x} is wrong")
        def fail():
            raise ValueError(f"{x} in a thread")
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        raise KeyError("x" * 285 + x)  # shortened in its middle
    if what == "refuse":
        raise InputError("one", "two")
    if what == "exit":
        sys.exit(3)
    if what == "print":
        print("said by the worker")
        os.write(1, b"and by its descriptor")
    if what == "odd":
        return lambda: None
    if what == "leave":
        import subprocess
        left = [subprocess.Popen(["sleep", "1000"]).pid for _ in range(2)]
        if x:
            os._exit(1)
        return left
    return x
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A file that is not installed, as most rewards are."""
    file = tmp_path_factory.mktemp("functions") / "mine.py"
    file.write_text(FUNCTIONS)
    return load_file(file)


@pytest.fixture(scope="module")
def pool(functions: Any) -> Iterator[workers.Pool]:
    pool = workers.Pool(functions.work, 2, memory=1 << 30)
    yield pool
    pool.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_values_come_in_the_order_of_the_calls(pool: workers.Pool) -> None:
    calls = [("sleep", 0.05 if i == 0 else 0) for i in range(20)]
    assert pool.outcomes(calls) == [0.05] + [0] * 19


def test_a_worker_has_its_own_session_and_inherits_nothing(
    pool: workers.Pool, functions: Any, tmp_path: Path
) -> None:
    with functions.LOCK, (tmp_path / "open").open("w"):
        pid, session, has_jax, locked, descriptors = pool.submit("where").result()
    assert pid == session != os.getsid(0)
    assert not has_jax
    assert not locked
    assert len(descriptors) <= 6  # three, two pipes, and the directory that it lists


def test_its_own_limits_mean_too_slow_and_interrupt_what_holds_the_interpreter(pool: workers.Pool) -> None:
    begin = time.perf_counter()
    spin, regex, done = pool.outcomes([("spin",), ("regex",), ("value", 7)], cpu_seconds=0.3)
    assert (type(spin), type(regex), done) == (workers.TooSlowError, workers.TooSlowError, 7)
    late, regex = pool.outcomes([("sleep", 60), ("regex",)], seconds=0.5)
    assert str(late) == str(regex) == "took longer than 0.5 s"
    assert time.perf_counter() - begin < 20


def test_cpu_time_is_not_the_clocks(pool: workers.Pool) -> None:
    assert pool.outcomes([("sleep", 0.5)], cpu_seconds=0.2) == [0.5]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGPROF])
def test_any_other_death_is_tried_again_and_then_reported(pool: workers.Pool, number: signal.Signals) -> None:
    (died,) = pool.outcomes([("kill", number)], seconds=60)
    assert isinstance(died, workers.DiedError)
    assert f"ended by {number.name}" in str(died)
    assert pool.outcomes([("value", 1)]) == [1]


def test_a_worker_that_is_killed_costs_nothing(pool: workers.Pool, tmp_path: Path) -> None:
    assert pool.outcomes([("kill once", str(tmp_path / "was here"))]) == [str(tmp_path / "was here")]
    future = pool.submit("sleep", 1.0)
    time.sleep(0.3)
    for pid in pool.processes:
        os.kill(pid, signal.SIGKILL)
    assert future.result(timeout=60) == 1.0


def test_memory_beyond_the_limit_is_an_error_of_the_call(pool: workers.Pool) -> None:
    big, small = pool.outcomes([("grow", 2 << 30), ("grow", 1 << 20)])
    assert (type(big), big.type_name, small) == (workers.RaisedError, "MemoryError", 1 << 20)


def test_what_is_raised_says_what_and_where(pool: workers.Pool) -> None:
    raised, refused, left, odd = pool.outcomes([("raise",), ("refuse",), ("exit",), ("odd",)])
    assert re.fullmatch(r"raised KeyError: 'gold' \(.*mine\.py line \d+\)", str(raised))
    assert isinstance(refused, InputError)
    assert refused.problems == ("one", "two")
    assert left.type_name == "SystemExit"
    assert "cannot be sent" in str(odd)
    assert pool.outcomes([("value", 5)]) == [5]


def test_what_it_prints_goes_to_stderr(functions: Any, capfd: pytest.CaptureFixture[str]) -> None:
    pool = workers.Pool(functions.work, 1)  # its stderr is the one of when it was started
    pool.submit("print").result()
    pool.close()
    out, err = capfd.readouterr()
    assert out == ""
    assert "said by the worker" in err
    assert "and by its descriptor" in err


def test_workers_hide_secrets_in_errors_and_in_what_python_prints(
    functions: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    secret = remember("canary-in-a-worker-5")
    pool = workers.Pool(functions.work, 1)
    (raised,) = pool.outcomes([("tell", secret)])
    pool.close()
    err = capfd.readouterr().err
    assert f"{HIDDEN} is wrong" in err
    assert f"ValueError: {HIDDEN} in a thread" in err
    assert "canary" not in f"{err}{raised}"


def test_a_thousand_calls_leave_no_descriptor_and_no_zombie(functions: Any) -> None:
    before = set(os.listdir("/proc/self/fd"))
    pool = workers.Pool(functions.work, 2)
    assert pool.outcomes([("value", i) for i in range(1000)]) == list(range(1000))
    pool.outcomes([("kill", signal.SIGKILL), ("spin",)], cpu_seconds=0.1)
    pids = pool.processes
    pool.close()
    assert set(os.listdir("/proc/self/fd")) == before
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    assert not any(not alive(int(pid)) for pid in children)


def test_the_end_of_a_stage_closes_pools(functions: Any) -> None:
    kept = workers.Pool(functions.work, 1)
    kept.submit("value", 1).result()
    (first,) = kept.processes
    busy = kept.submit("sleep", 60)
    workers.close()
    assert not alive(first)
    assert isinstance(busy.exception(timeout=20), workers.DiedError)
    assert kept.closed
    with pytest.raises(RuntimeError, match="closed"):
        kept.submit("value", 1)


def test_workers_die_with_their_parent(functions: Any, tmp_path: Path) -> None:
    program = f"""
import sys, time
from pathlib import Path
from rlhf_core.workers import pool as workers
from rlhf_core.config import HIDDEN, remember
from rlhf_core.plugins.component import load_file
pool = workers.Pool(load_file(Path({functions.__file__!r})).work, 1)
pool.submit("value").result()
pool.submit("spin")
print(*pool.processes, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
    wait_for(lambda: not alive(pid))


def test_what_a_function_started_ends_with_its_worker(functions: Any) -> None:
    pool = workers.Pool(functions.work, 1)
    left = pool.submit("leave").result()
    assert all(map(alive, left))
    pool.close()
    wait_for(lambda: not any(map(alive, left)))  # the kernel ends them in its own time
    before = set(os.listdir("/proc"))
    pool = workers.Pool(functions.work, 1)
    with pytest.raises(workers.DiedError):
        pool.submit("leave", True).result()
    pool.close()

    def sleeps(pid: str) -> bool:
        try:
            return b"sleep\x001000" in Path(f"/proc/{pid}/cmdline").read_bytes()  # empty of what has ended
        except OSError:
            return False

    # The kernel ends them in its own time.
    wait_for(lambda: not any(map(sleeps, filter(str.isdecimal, set(os.listdir("/proc")) - before))))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda functions: lambda: None, "is not an attribute of a module"),
        (lambda functions: functions.LOCK, "cannot pickle"),
    ],
)
def test_what_has_no_name_elsewhere_is_refused(make: Any, said: str, functions: Any) -> None:
    with pytest.raises(UnsendableError, match=said):
        workers.Pool(make(functions), 1)


def test_a_file_that_changed_since_it_was_read_is_not_mixed_with_what_it_was(tmp_path: Path) -> None:
    file = tmp_path / "changes.py"
    file.write_text("def one():\n    return 1\n")
    pool = workers.Pool(load_file(file).one, 1)
    file.write_text("def one():\n    return 2\n")
    with pytest.raises(workers.RaisedError, match=r"changes\.py changed during the run"):
        pool.submit().result()
    pool.close()


def test_one_event_loop_for_all_calls() -> None:
    import asyncio

    async def where() -> tuple[Any, int]:
        return asyncio.get_running_loop(), threading.get_ident()

    first = run_async(where())
    assert run_async(where()) == first
    workers.close()
    assert first[0].is_closed()
    assert run_async(where())[0] is not first[0]
