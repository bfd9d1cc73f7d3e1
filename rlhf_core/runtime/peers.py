"""Watch the other processes of a job: when one ends, the others end soon after, and one of them prints why.

Each process has a connection to the first one and sends one JSON object per line. A failing process reports it before
it ends; when one is killed, the kernel closes its connection. The others may then be inside a collective that never
returns, so a thread ends them.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from rlhf_core.errors import InputError, Stopped
from rlhf_core.runtime import signals

PROTOCOL = 1
POLL_SECONDS = 0.3
GRACE_SECONDS = 5.0
"""How long this process may go on after another one failed: time to fail by itself, for the same reason."""
WRITING_SECONDS, STOPPING_SECONDS = 15.0, 600.0
"""How long an end waits for files being written: after another process failed, and after one was stopped."""
LEAVE_SECONDS = 20.0
LINE_SECONDS = 5.0
_CODES = (1, 2, 75)


def send(link: socket.socket, message: Mapping[str, Any]) -> None:
    """Send a message, or lose it if the connection is gone, which its receiver notices by other means."""
    with suppress(OSError):
        link.sendall(json.dumps(message).encode() + b"\n")


def receive(link: socket.socket, seconds: float) -> dict[str, Any] | None:
    """Wait up to `seconds` for the next message to begin, and read it; None if none begins, or it does not end.

    Reads byte by byte, so as to take nothing of the message after it.
    """
    until, line = time.monotonic() + seconds, b""
    while not line.endswith(b"\n") and len(line) < 2**16:
        left = until - time.monotonic()
        if left <= 0 or not select.select([link], [], [], left)[0]:
            return None
        try:
            byte = link.recv(1)
        except OSError:
            return None
        if not byte:
            return None
        if not line:
            until = time.monotonic() + LINE_SECONDS
        line += byte
    return parse_message(line)


def is_gone(link: socket.socket) -> bool:
    """Check whether the other end of a connection was closed."""
    try:
        return bool(select.select([link], [], [], 0)[0]) and not link.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


def parse_message(line: bytes) -> dict[str, Any] | None:
    """Parse the JSON object in a line; None if it holds none."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def code_of(error: BaseException) -> int:
    """Return the exit code for the exception that ended a run."""
    if isinstance(error, InputError):
        return 2
    return 75 if isinstance(error, Stopped) else 1


class Cause:
    """Why the job ends: the process that ended first, the exit code of all, and whether that process was killed.

    run: the run that this process was in, counted from 1; 0 before the first.
    """

    def __init__(self, process: int, code: int, run: int = 0, *, killed: bool = False) -> None:
        self.process, self.run, self.killed = process, run, killed
        self.code = code if code in _CODES else 1
        if killed and signals.stop_requested():
            self.code = 75

    def line(self, me: int, count: int) -> str:
        """Write the message of process `me`."""
        how = "stopped by a signal" if self.code == 75 else "failed, and says why"
        how = "is gone without a word: killed, crashed or unreachable" if self.killed else how
        rest = "; the same command goes on from the newest checkpoint" if self.killed else ""
        return f"process {me} of {count} ends: process {self.process} {how}{rest}"


class _Watch:
    def __init__(self, process: int, count: int) -> None:
        self.process, self.count = process, count
        self.links: dict[int, socket.socket] = {}
        self.left: set[int] = set()
        self.cause: Cause | None = None
        self.printed: set[str] = set()
        self.answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.running = 0  # how many nested `joint_run` are entered
        self.run, self.left_run = 0, -1  # the number of the newest run, and of the last one that raised
        self.writing = 0
        self.ended = False
        self.lock = threading.Lock()

    def add(self, number: int, link: socket.socket) -> None:
        link.settimeout(None)
        for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):  # a machine that lost power or network closes nothing
                link.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.links[number] = link
        threading.Thread(target=self._listen, args=(number, link), daemon=True, name=f"peer {number}").start()

    def _listen(self, number: int, link: socket.socket) -> None:
        with suppress(OSError), link.makefile("rb") as lines:
            for line in lines:
                self._handle(number, parse_message(line) or {})
        self.answers.put(True)  # a process that is gone prints nothing more
        if number not in self.left:
            self.left.add(number)
            message = {"ended": 1, "process": number, "killed": True}
            self._end_soon(Cause(number, 1, killed=True), message, number)

    def _handle(self, number: int, message: dict[str, Any]) -> None:
        if "bye" in message:
            self.left.add(number)
        elif "ask" in message:
            with self.lock:
                speak = message["ask"] not in self.printed
                self.printed.add(message["ask"])
            send(self.links[number], {"speak": speak})
        elif "speak" in message:
            self.answers.put(bool(message["speak"]))
        elif "ended" in message:
            killed, who = bool(message.get("killed")), int(message["process"])
            if who == number:
                self.left.add(number)
            self.printed.update(message.get("said", ()))
            cause = Cause(who, int(message["ended"]), int(message.get("run", 0)), killed=killed)
            self._end_soon(cause, message, number)

    def _send(self, message: Mapping[str, Any], but: int | None = None) -> None:
        """Send to all from the first process, and from another one to the first, which passes it on."""
        for number, link in list(self.links.items()):
            if number != but:
                send(link, message)

    def _end_soon(self, cause: Cause, message: Mapping[str, Any], sender: int) -> None:
        """Note the cause, pass it on, and end. In this order: others end at once and say so, which is no cause."""
        with self.lock:
            # All have left that run, and the script goes on.
            past = not cause.killed and cause.run <= self.left_run
            first = self.cause is None and not self.ended and not past
            if first:
                self.cause = cause
        self._send(message, but=sender)
        if not first:
            return
        if cause.code == 75:
            signals.request_stop()
        threading.Thread(target=self._end, args=(cause,), daemon=True, name="peer's end").start()

    def _end(self, cause: Cause) -> None:
        while self.run < cause.run and not cause.killed:  # until its run begins, this process needs no other
            time.sleep(POLL_SECONDS)
        if not cause.killed:
            time.sleep(GRACE_SECONDS)
        stopping = cause.code == 75 and not cause.killed
        until = time.monotonic() + (STOPPING_SECONDS if stopping else WRITING_SECONDS)
        while self.writing and time.monotonic() < until:
            time.sleep(0.05)
            if stopping and not self.writing:
                time.sleep(GRACE_SECONDS)
        with self.lock:
            if self.ended:
                return
            if not cause.killed and cause.run <= self.left_run:
                self.cause = None
                return
            self.ended = True
        self.leave(cause.code, cause.line(self.process, self.count))

    def leave(self, code: int, message: str) -> NoReturn:
        """Exit without the cleanup of Python and jax, which would wait for processes that are gone."""
        _print(message)
        self.send_end(code)
        if (
            code == 75 and self.process != 0
        ):  # a launcher may kill the first one, still writing, as soon as one ends
            until = time.monotonic() + STOPPING_SECONDS + LEAVE_SECONDS
            while time.monotonic() < until and 0 in self.links and 0 not in self.left:
                time.sleep(0.05)
        if self.process == 0:  # the others lose jax's service with it
            until = time.monotonic() + LEAVE_SECONDS
            while time.monotonic() < until and any(not is_gone(link) for link in self.links.values()):
                time.sleep(0.05)
        os._exit(code)

    def send_end(self, code: int) -> None:
        self._send({"ended": code, "process": self.process, "run": self.run, "said": sorted(self.printed)})

    def may_print(self, message: str) -> bool:
        """Check that no other process has printed the same message."""
        with self.lock:
            if message in self.printed:
                return False
            self.printed.add(message)
        if self.process == 0 or 0 not in self.links:
            return True
        send(
            self.links[0], {"ask": message}
        )  # even if the first has failed: it may be about to print the same
        try:
            return self.answers.get(timeout=LEAVE_SECONDS / 2)
        except queue.Empty:
            return True


_watch: _Watch | None = None


def is_watching() -> bool:
    """Check whether this is one of several processes that watch each other."""
    return _watch is not None


def watch(process: int, count: int, links: Mapping[int, socket.socket]) -> None:
    """Watch the processes at the other ends of these connections until this process ends."""
    global _watch
    _watch = _Watch(process, count)
    for number, link in links.items():
        _watch.add(number, link)
    signals.may_print = _watch.may_print
    os.register_at_fork(after_in_child=_close_in_child)
    atexit.register(_at_exit)


def meet(client: Any, host: str, process: int, count: int) -> None:
    """Watch the processes of a job that has joined already, which exchange their address in jax's key-value store."""
    watch(process, count, {})
    watcher = _watch
    assert watcher is not None
    if process == 0:
        listener = socket.create_server(("", 0), backlog=4096)
        client.key_value_set("rlhf/peers", f"{host}:{listener.getsockname()[1]}")

    def connect() -> None:
        with suppress(Exception):  # otherwise jax's heartbeats notice later that a process is gone
            if process != 0:
                name, _, port = client.blocking_key_value_get("rlhf/peers", 300_000).rpartition(":")
                link = socket.create_connection((name, int(port)), timeout=20)
                send(link, {"rlhf": PROTOCOL, "process": process, "count": count})
                watcher.add(0, link)
                return
            with listener:
                while len(watcher.links) < count - 1:
                    link, _ = listener.accept()
                    hello = receive(link, seconds=5) or {}
                    if hello.get("rlhf") == PROTOCOL and isinstance(hello.get("process"), int):
                        watcher.add(hello["process"], link)

    threading.Thread(target=connect, daemon=True, name="peers").start()


@contextmanager
def joint_run() -> Iterator[None]:
    """Enter a run of this process that ends with those of the others, and report to them what it raises."""
    if _watch is None:
        yield
        return
    if not _watch.running:
        _watch.run += 1
    _watch.running += 1
    try:
        yield
    except BaseException as error:
        if _watch.running == 1 and not _watch.cause:
            _watch.send_end(code_of(error))
        if _watch.running == 1:
            _watch.left_run = _watch.run
        raise
    finally:
        _watch.running -= 1


@contextmanager
def hold_end() -> Iterator[None]:
    """Delay an end that another process causes while this one writes files, which needs no other process."""
    if _watch is None:
        yield
        return
    _watch.writing += 1
    try:
        yield
    finally:
        _watch.writing -= 1


def end(code: int, message: str) -> None:
    """Exit a failed or stopped process of several, printing `message` once per job. In a job of one, just return."""
    if _watch is None:
        return
    if code not in (2, 75):
        time.sleep(
            0.5
        )  # a collective may have failed because another process did, whose message is on its way
    with _watch.lock:
        if _watch.ended:  # the thread is ending it
            threading.Event().wait()
        _watch.ended = True
        cause = _watch.cause
    if cause is not None and (cause.killed or code not in (2, 75)):
        _watch.leave(cause.code, cause.line(_watch.process, _watch.count))
    if cause is not None and code == 75 and not signals.signal_received():
        message = cause.line(
            _watch.process, _watch.count
        )  # the process that received the signal prints the rest
    elif not _watch.may_print(message):
        message = ""
    _watch.leave(code, message)


def end_after(process: int, count: int, message: Mapping[str, Any]) -> NoReturn:
    """Exit a process that has not joined yet, because the first one has ended."""
    cause = Cause(int(message["process"]), int(message["ended"]), killed=False)
    _print(cause.line(process, count))
    os._exit(cause.code)


def _at_exit() -> None:
    """End the others if a script ends by an exception; otherwise let it wait for them in jax's barrier."""
    if _watch is None:
        return
    raised: BaseException | None = getattr(sys, "last_value", None)
    if raised is not None:
        _watch.ended = True
        _watch.leave(code_of(raised), "")
    _watch._send({"bye": True})


def _close_in_child() -> None:
    """Close the connections in a forked child, which would keep them open after this process has died."""
    global _watch
    if _watch is not None:
        for link in _watch.links.values():
            link.close()
    _watch = None


def _print(message: str) -> None:
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    with suppress(OSError, ValueError):
        if message:
            sys.stderr.write(message.rstrip("\n") + "\n")
        sys.stderr.flush()
