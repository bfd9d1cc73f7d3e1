"""Write the data of each seed and train what every run starts from: the quickstart's stage `base`.

python benchmarks/learning/prepare.py [--seed 0 1 2]
"""

from __future__ import annotations

import argparse
import tomllib

import task
from rlhf_sft import SFTConfig, SFTTrainer
from rlhf_tools.demo.generate import generate


def prepare(seed: int) -> None:
    data = task.data(seed)
    if not (data / "data.json").exists():
        generate(data, seed=seed)
    if task.base(seed).exists():
        return
    quickstart = tomllib.loads((task.QUICKSTART / "quickstart.toml").read_text("utf-8"))
    table = {k: v for k, v in quickstart["stage"][0].items() if k not in ("name", "trainer")}
    table["model"]["tokenizer"] = str(data / "tokenizer")
    files = {field: str(data.parent / table[field]) for field in ("train_data", "eval_data")}
    directory = str(data.parent / "base")
    SFTTrainer(SFTConfig.from_dict({**table, **files, "seed": seed, "save_directory": directory})).train()


def main() -> None:
    parser = argparse.ArgumentParser(description="Data and initial weights.")
    parser.add_argument("--seed", type=int, nargs="+", default=task.SEEDS)
    for seed in parser.parse_args().seed:
        prepare(seed)


if __name__ == "__main__":
    main()
