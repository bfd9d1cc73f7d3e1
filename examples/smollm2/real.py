"""Teach SmolLM2 one thing, and print what it learned: `make real`, or `python examples/smollm2/real.py b`.

Each run, model and seed has a directory, such as `runs/smollm2-words-seed0`, with the data, the pipeline file and all
stages. Interrupted, the same command goes on; finished, it prints the table again and trains nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from table import closing_table
from tasks import Sizes, generate, settings

HERE = Path(__file__).resolve().parent
OURS = HERE.parents[1] / ".cache" / "smollm2"
"""Where `make real` puts the model."""
LONGEST = 32
"""Tokens of a completion, as in the pipelines."""
TEMPERATURE = 0.7
"""Of training, and of the completions before and after."""
PAIR_PROMPTS = 256
"""Prompts whose completions become preference pairs."""


@dataclass(frozen=True)
class Run:
    """One thing to learn.

    pipeline: its file. tasks: what it is judged on. title: for the table. begins: the stage that gets the model.
    rewards: whether rewards can be shuffled. pairs: whether it needs preference pairs. episodes: whether it has an
    environment; "before" is then the policy before its first update, as its stage has sampled it.
    """

    pipeline: str
    tasks: str
    title: str
    begins: str = "policy"
    rewards: bool = True
    pairs: bool = False
    episodes: bool = False


RUNS = {
    "a": Run("sums.toml", "sums", "GRPO on small sums in words"),
    "b": Run("words.toml", "words", "GRPO on sentences under constraints"),
    "c": Run(
        "preferences.toml",
        "words",
        "SFT, a reward model and GRPO, from preferences",
        begins="base",
        rewards=False,
        pairs=True,
    ),
    "d": Run("dpo.toml", "words", "DPO on the same preferences", rewards=False, pairs=True),
    "e": Run("lora.toml", "words", "GRPO on sentences under constraints, with adapters"),
    "f": Run(
        "tool.toml", "products", "SFT and GRPO on products, with a calculator", begins="base", episodes=True
    ),
}


def prepare(
    run: Run, directory: Path, model: str, seed: int, sizes: Sizes, *, shuffled: bool, pair_prompts: int
) -> Path:
    """Write data, rewards and pipeline file into the run directory, if missing; return the pipeline file."""
    from rlhf_core.artifacts import write_atomic
    from rlhf_core.errors import InputError

    made = {**settings(seed, sizes), "model": model, "shuffled": shuffled}
    written = directory / "run.json"
    if written.exists() and json.loads(written.read_text()) != made:
        raise InputError(f"{written} has other settings than this run; delete {directory} to start anew")
    if not written.exists():
        generate(directory / "data", seed=seed, sizes=sizes)
        if run.pairs:
            from pairs import write_pairs

            from rlhf_core import load_model

            write_pairs(
                directory / "data", load_model(model), prompts=pair_prompts, seed=seed, longest=LONGEST
            )
        write_atomic(written, json.dumps(made, indent=2) + "\n")
    for name in ("rewards.py", "calc.py", "chat.jinja"):
        shutil.copyfile(HERE / name, directory / name)
    pipeline = directory / run.pipeline
    write_atomic(pipeline, (HERE / run.pipeline).read_bytes())
    return pipeline


def teach(
    name: str,
    directory: Path,
    model: str,
    *,
    seed: int,
    shuffle_rewards: bool = False,
    sizes: Sizes | None = None,
    pair_prompts: int = PAIR_PROMPTS,
    sets: Sequence[str] = (),
) -> dict[str, Any]:
    """Run or find the run `name` of RUNS in `directory` and return its figures, which `summary.json` there keeps.

    sets: changes to the pipeline file, as `rlhf run --set` takes them.
    """
    from rlhf_core import artifacts, run_pipeline
    from rlhf_core.errors import InputError

    run = RUNS[name]
    if shuffle_rewards and not run.rewards:
        raise InputError(f"run {name} has no rewards of its own to shuffle; a, b, e and f have")
    clock = Clock()
    pipeline = prepare(
        run, directory, model, seed, sizes or Sizes(), shuffled=shuffle_rewards, pair_prompts=pair_prompts
    )
    clock.lap("data")
    own = [f"seed={seed}", f"{run.begins}.model={model}"]
    own += ["policy.rewards[0].shuffled=true"] if shuffle_rewards else []
    results = run_pipeline(pipeline, sets=[*own, *sets], dir=directory)
    clock.lap("training")
    made = {
        stage: artifacts.identity(result.artifacts["model"].path) for stage, result in results.stages.items()
    }
    file = directory / "summary.json"
    if file.exists() and (summary := json.loads(file.read_text()))["artifacts"] == made:
        return {**summary, "found": True}
    summary = {
        "artifacts": made,
        "title": run.title,
        "model": model,
        "seed": seed,
        "shuffled": shuffle_rewards,
        "temperature": TEMPERATURE,
    }
    summary |= measure_run(run, directory, model, seed)
    clock.lap("measuring")
    summary["seconds"] = clock.laps
    artifacts.write_atomic(file, json.dumps(summary, indent=2) + "\n")
    return {**summary, "found": False}


def measure_run(run: Run, directory: Path, model: str, seed: int) -> dict[str, Any]:
    """Measure the model before and after on the held-out tasks."""
    from measure import describe, paired_gain, read_episodes, read_rows

    rows = read_rows(directory / "data" / f"{run.tasks}.heldout.jsonl")
    if run.episodes:
        rows, completions = read_episodes(directory / "policy" / "samples", rows)
    else:
        completions = complete_both(rows, directory, model, seed)
    sides = {side: describe(rows, texts) for side, texts in completions.items()}
    gain = paired_gain(sides["before"]["right"], sides["after"]["right"])
    return {"prompts": [row["prompt"][-1]["content"] for row in rows], **sides, "gain": gain}


def complete_both(
    rows: Sequence[Mapping[str, Any]], directory: Path, model: str, seed: int
) -> dict[str, list[tuple[str, bool]]]:
    """Sample completions before and after, with the same random numbers."""
    from measure import complete

    from rlhf_core import load_model

    return {
        side: complete(
            load_model(path),
            [row["prompt"] for row in rows],
            seed,
            temperature=TEMPERATURE,
            max_completion_length=LONGEST,
        )
        for side, path in (("before", model), ("after", directory / "policy" / "artifacts" / "model"))
    }


class Clock:
    """Take wall and CPU seconds of the parts of this attempt."""

    def __init__(self) -> None:
        self.laps: dict[str, tuple[float, float]] = {}
        self._at = self._now()

    def lap(self, name: str) -> None:
        """Note the seconds since the last lap under a name."""
        wall, cpu = self._now()
        self.laps[name] = (round(wall - self._at[0], 1), round(cpu - self._at[1], 1))
        self._at = wall, cpu

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.monotonic(), time.process_time()


def main() -> None:
    """Run what is asked for; exit codes are those of `rlhf run`."""
    parser = argparse.ArgumentParser(
        description="Teach SmolLM2 one thing, then print a table.",
        epilog="\n".join(f"  {name}  {run.title}" for name, run in RUNS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", choices=[*RUNS, "all"], help="what to learn, see below")
    parser.add_argument("--model", default=str(OURS), help=f"a directory or a hub name; default {OURS}")
    parser.add_argument("--seed", type=int, default=0, help="of the data and of all stages")
    parser.add_argument(
        "--shuffle-rewards", action="store_true", help="deal rewards out at random: a control"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="sets",
        metavar="STAGE.FIELD=VALUE",
        help="as `rlhf run --set`",
    )
    arguments = parser.parse_args()
    from rlhf_core.errors import InputError, RunError, Stopped

    warnings.formatwarning = lambda message, *_: f"{message}\n"  # without the place in the code
    local = Path(arguments.model).expanduser()
    model = str(local.resolve()) if local.is_dir() else arguments.model
    suited = [name for name, run in RUNS.items() if run.rewards or not arguments.shuffle_rewards]
    names = suited if arguments.run == "all" else [arguments.run]
    own = "" if model == str(OURS) else f"-{Path(model).name}"
    try:
        if model == str(OURS) and not local.is_dir():
            raise InputError(f"{OURS} is missing; python {HERE / 'prepare.py'} {OURS} makes it")
        for name in names:
            directory = Path("runs") / (
                f"smollm2-{Path(RUNS[name].pipeline).stem}{own}-seed{arguments.seed}"
                f"{'-shuffled' if arguments.shuffle_rewards else ''}"
            )
            summary = teach(
                name,
                directory,
                model,
                seed=arguments.seed,
                shuffle_rewards=arguments.shuffle_rewards,
                sets=arguments.sets,
            )
            Console(highlight=False).print(closing_table(summary, directory))
    except (InputError, RunError, Stopped) as error:
        print(error, file=sys.stderr)
        sys.exit({InputError: 2, RunError: 1, Stopped: 75}[type(error)])


if __name__ == "__main__":
    main()
