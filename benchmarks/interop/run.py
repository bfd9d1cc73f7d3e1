"""Models and adapters from here to transformers and peft, and back: everything, in one command.

    python benchmarks/interop/run.py TORCH_PYTHON [--pretrained MODEL] [--seed 0] [--case llama …]

TORCH_PYTHON: the interpreter of PyTorch's environment. Runs prepare.py and torch_side.py, opens here what peft made
there, and prints one JSON object last; of a run of everything, it is written to results/interop.json too. Exit code 1:
something differs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import page
import task

from rlhf_core import load_model


def from_peft(place: Path) -> dict[str, Any]:
    """What adapters made by peft give here."""
    ours, theirs = np.load(place / "ours.npz"), np.load(place / "torch.npz")
    seen, found = ours["mask"] > 0, {}
    for name in (name for name in theirs.files if not name.endswith(" without")):
        kind = name.split("-")[1]
        model = load_model(place / name, "score" if kind == "score" else "lm")
        made = model.scores if kind == "score" else model.logits
        given, here, without = (
            np.asarray(x)[... if kind == "score" else seen]
            for x in (theirs[name], made(ours["ids"], ours["mask"]), theirs[f"{name} without"])
        )
        options = list(task.adapters(place.name))[int(name.split("-")[2])]
        found[f"from peft, {kind}, {options}"] = {
            "difference": float(np.abs(given - here).max()),
            "spread": float(given.std()),
            "moved": float(np.abs(given - without).max()),
        }
    return found


def problems(row: dict[str, Any]) -> list[str]:
    """What is wrong with one comparison, in words."""
    found = []
    if not row["difference"] <= task.TOLERANCE:
        found.append(f"differs by {row['difference']:.2g}")
    if row.get("pooled") != row.get("lengths"):
        found.append(f"transformers reads tokens {row['pooled']} of rows of {row['lengths']}")
    if row.get("class") != row.get("named"):
        found.append(f"config.json names {row['named']}, transformers opens {row['class']}")
    found += [
        f"its {name} is {row[name]:.2g}: too little to show a mistake"
        for name in ("spread", "moved")
        if not row.get(name, task.LEAST) >= task.LEAST
    ]
    return found


def report(python: str, seeds: list[int], cases: list[str]) -> dict[str, Any]:
    """The result: every comparison's difference, a list by seed, and all that is wrong."""
    differences: dict[str, dict[str, list[float]]] = {}
    wrong, versions = [], {}
    for seed in seeds:
        for case in cases:
            place = task.directory(seed, case)
            torch = json.loads((place / "torch.json").read_text(encoding="utf-8"))
            versions = torch["versions"]
            rows = {**torch["checks"], **from_peft(place), "the page's code": page.follow(python, place)}
            for name, row in rows.items():
                differences.setdefault(case, {}).setdefault(name, []).append(
                    float(f"{row['difference']:.2g}")
                )
                wrong += [f"seed {seed}, {case}, {name}: {problem}" for problem in problems(row)]
    everything = [x for rows in differences.values() for each in rows.values() for x in each]
    return {
        "ok": bool(everything) and not wrong,
        "tolerance": task.TOLERANCE,
        "largest": max(everything, default=None),
        "comparisons": len(everything),
        "wrong": wrong,
        "seeds": seeds,
        "versions": {
            "rlhf-core": version("rlhf-core"),
            "jax": version("jax"),
            "python": ".".join(map(str, sys.version_info[:3])),
            **versions,
        },
        "differences": differences,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Models and adapters to PyTorch and back.")
    parser.add_argument("torch_python")
    parser.add_argument("--pretrained", help="directory of a language model with a tokenizer")
    parser.add_argument("--seed", type=int, nargs="+", default=list(task.SEEDS))
    parser.add_argument("--case", nargs="+", choices=task.CASES, default=list(task.CASES))
    arguments = parser.parse_args()
    cases = [case for case in arguments.case if case != task.PRETRAINED or arguments.pretrained]
    chosen = ["--seed", *map(str, arguments.seed), "--case", *cases]
    pretrained = ["--pretrained", arguments.pretrained] if arguments.pretrained else []
    for python, script, more in (
        (sys.executable, "prepare.py", pretrained),
        (arguments.torch_python, "torch_side.py", []),
    ):
        subprocess.run([python, str(task.HERE / script), *chosen, *more], check=True)
    warnings.filterwarnings("ignore", "(?s).*its reward head is new")
    found = report(arguments.torch_python, arguments.seed, cases)
    text = json.dumps(found)
    if (arguments.seed, cases) == (list(task.SEEDS), list(task.CASES)):
        (task.RESULTS / "interop.json").write_text(text + "\n", encoding="utf-8")
    print(text)
    sys.exit(0 if found["ok"] else 1)


if __name__ == "__main__":
    main()
