"""Run a pipeline in Ray's actors: `python ray_run.py`, or `ray job submit -- python ray_run.py`."""

import os
import signal
import socket
import subprocess
import sys
import time

import ray

PROCESSES, GPUS = 2, 8  # one process per machine, with all of its GPUs
PROJECT = "/path/to/project"  # on a disk that all machines share
RLHF = "/path/to/venv/bin/rlhf"

# When an actor ends, with its driver or with Ray, its child is killed, and the kernel then sends SIGTERM to the child's
# own: the run, which saves its state.
HELD = ["setpriv", "--pdeathsig", "KILL", "bash", "-c", 'trap : TERM; "$@"; exit $?', "held"]
HELD += ["setpriv", "--pdeathsig", "TERM"]


@ray.remote(num_gpus=GPUS, max_concurrency=2, scheduling_strategy="SPREAD")
class Process:
    """One process of the job."""

    def __init__(self):
        self.child = None

    def address(self):
        """Choose where the first process waits for the others."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def run(self, address, number):
        """Run the pipeline; return its exit code."""
        place = {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": str(PROCESSES),
            "JAX_PROCESS_ID": str(number),
        }
        command = [*HELD, RLHF, "run", "pipeline.toml"]
        self.child = subprocess.Popen(
            command, cwd=PROJECT, env={**os.environ, **place}, start_new_session=True
        )
        return self.child.wait()

    def stop(self):
        """Stop the run, with its state saved."""
        while self.child is None:
            time.sleep(0.1)
        os.killpg(self.child.pid, signal.SIGTERM)


def main():
    """Run the job; return its exit code: 2 if a process ended with it, else 1, else 75, else 0."""
    ray.init()
    actors = [Process.remote() for _ in range(PROCESSES)]
    signals = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: signals.append(number))
    address = ray.get(actors[0].address.remote())
    running = [actor.run.remote(address, number) for number, actor in enumerate(actors)]
    codes = set()
    while running:
        ended, running = ray.wait(running, timeout=1)
        for result in ended:
            try:
                code = ray.get(result)
            except ray.exceptions.RayError:  # a machine is lost
                code = 1
            codes.add(code if code in (0, 2, 75) else 1)
        if signals:
            signals.clear()
            for actor in actors:
                actor.stop.remote()
    return next(code for code in (2, 1, 75, 0) if code in codes)


if __name__ == "__main__":
    sys.exit(main())
