"""A plugin file that signals its own process at one event: INTERRUPT="SIGKILL policy step 5", "SIGTERM rm end"."""

import os
import signal
import threading

from rlhf_core import hookimpl


def at(*event):
    name, *wanted = os.environ.get("INTERRUPT", "none").split()
    if [str(part) for part in event] == wanted:
        # To the main thread, which then sees it before this call returns: of a signal to the process the kernel
        # picks a thread, and the loop may finish another update before the handler runs.
        signal.pthread_kill(threading.main_thread().ident, getattr(signal, name))


@hookimpl
def rlhf_step_end(stage, step, metrics):
    if "loss" in metrics:  # not at an evaluation
        at(stage.name, "step", step)


@hookimpl
def rlhf_artifact_saved(stage, artifact):
    at(stage.name, "saved")


@hookimpl
def rlhf_stage_end(stage, error):
    at(stage.name, "end")
