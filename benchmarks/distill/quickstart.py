"""Distil the quickstart's policy into a model of a quarter of its width, beside GRPO of that model.

    python benchmarks/distill/quickstart.py [--seeds 0 1 2] [--updates 120] [--dir runs/distill] [--small]

Both students start from the same SFT and see the same prompts, with 128 completions per update and the same number
of updates. GRPO uses the quickstart's reward model; distillation uses the quickstart's policy as teacher. Success,
as `rlhf_tools/demo/judge.py` defines it, is measured on sampled completions of held-out prompts, ten times in a
run. Prints a row of JSON for each seed and way, then a table. A finished run is found again and not repeated.
--small tries it out.
"""

from __future__ import annotations

import argparse
import json
import re
import time
import warnings
from pathlib import Path
from typing import Any

STUDENT = """
[[stage]]
name = "small"
trainer = "sft"
model = {{ SIZES, tokenizer = "data/tokenizer" }}
train_data = "data/corpus.jsonl"
eval_data = "data/corpus.heldout.jsonl"
num_train_epochs = 2
total_batch_size = 64
learning_rate = 3e-3
warmup_steps = 20
scheduler = "cosine"
max_sequence_length = 48

[[stage]]
name = "grpo"
trainer = "grpo"
rewards = [{{ name = "model", model = "rm.model" }}]
num_generations = 8
loss = {{ name = "dapo" }}
kl = {{ name = "k3", beta = 0.02 }}
learning_rate = 1e-3
{shared}
[[stage]]
name = "distilled"
trainer = "distill"
teacher_model = "policy.model"
divergence = "{divergence}"
num_train_epochs = 100
learning_rate = 1e-3
{shared}"""
SIZES = (
    'model_type = "llama", hidden_size = 32, num_hidden_layers = 4, num_attention_heads = 4, intermediate_size = 88, '
    "max_position_embeddings = 64, initializer_range = 0.08"
)
"""Of the student: the quickstart's, a quarter as wide."""
SHARED = """model = "small.model"
train_data = "data/prompts.jsonl"
eval_data = "data/prompts.heldout.jsonl"
total_batch_size = {batch}
max_training_steps = {updates}
evaluation_steps = {every}
eval_on_start = true
num_preview_samples = {prompts}
warmup_steps = 5
weight_decay = 0.0
max_prompt_length = 16
sampling = {{ temperature = 1.0, max_completion_length = 24 }}
"""
WAYS = ("grpo", "distilled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=120)
    parser.add_argument("--divergence", default="reverse_kl")
    parser.add_argument("--dir", type=Path, default=Path("runs/distill"))
    parser.add_argument("--small", action="store_true", help="few rows, small models and batches: no result")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    curves: dict[str, list[dict[int, float]]] = {way: [] for way in WAYS}
    for seed in arguments.seeds:
        began = time.monotonic()
        name = f"{arguments.divergence}-{arguments.updates}-seed{seed}{'-small' if arguments.small else ''}"
        directory = arguments.dir / name
        run(directory, seed, arguments.updates, arguments.divergence, small=arguments.small)
        for way in WAYS:
            curves[way].append(success(directory / way))
            print(json.dumps({"way": way, "seed": seed, "success": curves[way][-1]}), flush=True)
        print(json.dumps({"seed": seed, "seconds": round(time.monotonic() - began, 1)}), flush=True)
    print(table(curves))


def run(directory: Path, seed: int, updates: int, divergence: str, *, small: bool) -> None:
    """Run the quickstart and both students, or find them."""
    from rlhf_tools.demo.generate import Sizes, generate
    from rlhf_tools.demo.run import HERE

    from rlhf_core import run_pipeline

    sizes = Sizes(256, 256, 128, 64, 32, 32, 1024) if small else Sizes()
    if not (directory / "data" / "data.json").exists():
        generate(directory / "data", seed=seed, sizes=sizes)
    text = (HERE / "quickstart.toml").read_text(encoding="utf-8")
    batch = 16 if small else 128
    shared = SHARED.format(
        batch=batch, updates=updates, every=max(updates // 10, 1), prompts=sizes.heldout_prompts
    )
    text += STUDENT.replace("SIZES", SIZES).format(shared=shared, divergence=divergence)
    if small:
        text = re.sub(r"^(total_batch_size) = \d+", rf"\1 = {batch}", text, flags=re.M)
        text = text.replace(
            "hidden_size = 128, num_hidden_layers = 4", "hidden_size = 64, num_hidden_layers = 1"
        )
        text = re.sub(r"^num_train_epochs = [25]$", "max_training_steps = 4", text, flags=re.M)
    file = directory / "distill.toml"
    file.write_text(text, encoding="utf-8")
    run_pipeline(file, sets=[f"seed={seed}"], dir=directory)


def success(stage: Path) -> dict[int, float]:
    """Return {updates: share of the held-out prompts with a right completion}."""
    from rlhf_tools.demo.judge import judge

    shares = {}
    for file in sorted((stage / "samples").glob("evaluation-*.jsonl")):
        rows: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
        verdicts = [judge(row["prompt"], row["completion"], finished=row["finished"]).success for row in rows]
        shares[int(file.stem.partition("-")[2])] = sum(verdicts) / len(verdicts)
    return shares


def table(curves: dict[str, list[dict[int, float]]]) -> str:
    """Format the mean over seeds, and the lowest and highest, by updates."""
    lines = ["| updates | " + " | ".join(curves) + " |", "|---:|" + "---:|" * len(curves)]
    for step in sorted(next(iter(curves.values()))[0]):
        cells = []
        for runs in curves.values():
            values = [shares[step] for shares in runs]
            cells.append(f"{sum(values) / len(values):.3f} ({min(values):.3f} to {max(values):.3f})")
        lines.append(f"| {step} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
