"""Importing any module of the library changes nothing global: that is up to `runtime.prepare` and to runs."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import atexit, importlib, json, logging, os, pkgutil, signal, sys, threading, warnings

# What other libraries change when they are imported is not this library's.
THIRD_PARTY = "jax", "wandb", "orbax.checkpoint.v1", "datasets", "transformers", "math_verify"

def state():
    import jax
    loggers = logging.Logger.manager.loggerDict.values()
    return {
        "signal handlers": {n: repr(signal.getsignal(n)) for n in signal.valid_signals()},
        "hooks": {
            name: repr(getattr(module, name))
            for module, name in [(sys, "excepthook"), (sys, "unraisablehook"), (sys, "displayhook"),
                (threading, "excepthook"), (warnings, "showwarning"), (warnings, "formatwarning")]
        },
        "warning filters": {str(i): repr(each) for i, each in enumerate(warnings.filters)},
        "logging": {
            each.name: repr((each.filters, each.handlers, each.level))
            for each in [logging.getLogger(), *loggers]
            if isinstance(each, logging.Logger) and (each.filters or each.handlers or each.level)
        } | {"record factory": repr(logging.getLogRecordFactory())},
        "environment": dict(os.environ),
        "jax.config": {name: repr(value) for name, value in jax.config.values.items()},
        "atexit": atexit._ncallbacks(),
    }

for name in THIRD_PARTY:
    try:
        importlib.import_module(name)
    except ImportError:
        pass
before = state()
from rlhf_core.runtime.distributions import plugin_points
points = [*plugin_points()]
assert len(points) > 50
for package in sorted({point.module.partition(".")[0] for point in points}):
    module = importlib.import_module(package)
    for found in pkgutil.walk_packages(getattr(module, "__path__", ()), package + "."):
        if found.name.rpartition(".")[2] not in ("__main__", "child"):
            importlib.import_module(found.name)
after = state()
print(json.dumps({name: [before[name], after[name]] for name in after if before[name] != after[name]}))
"""


def test_no_global_is_changed() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {}
