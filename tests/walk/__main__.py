"""How much of the code one has to walk through: `make walk`, beside the figures of last time.

    python -m tests.walk             print both; exit code 1 where one is over 2 % higher than last time
    python -m tests.walk --record    write figures.json, in the commit that changes them
    python -m tests.walk --files     with the files of each walk
    python -m tests.walk --source    only what is read from the source, some seconds

Four tiny commands run under sys.setprofile. Counted are the functions of rlhf_core and plugins that are entered, the
files in which they stand, and their lines.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.walk import source

ROOT = Path(__file__).resolve().parents[2]
LAST = Path(__file__).with_name("figures.json")
TOLERANCE = 1.02
MODEL = """model = { model_type = "llama", hidden_size = 16, num_hidden_layers = 1, num_attention_heads = 2, \
intermediate_size = 32, tokenizer = "tok/" }
"""
GRPO = f"""[[stage]]
name = "policy"
trainer = "grpo"
{MODEL}train_data = "prompts.jsonl"
rewards = [{{ name = "my_rewards.py:brevity" }}]
num_generations = 2
total_batch_size = 4
max_training_steps = 2
sampling = {{ max_completion_length = 4 }}
progress_bar_type = "none"
"""
REWARD = f"""[[stage]]
name = "rm"
trainer = "reward"
{MODEL}train_data = "pairs.jsonl"
total_batch_size = 4
max_training_steps = 2
progress_bar_type = "none"
"""
FILES = {
    "my_rewards.py": "def brevity(completions):\n    return [-len(text) for text in completions]\n",
    "grpo.toml": f'dir = "runs/grpo"\n{GRPO}',
    "warm.toml": f'dir = "runs/warm"\n{GRPO}'.replace("max_training_steps = 2", "max_training_steps = 6"),
    "rm.toml": f'dir = "runs/rm"\n{REWARD}',
    "typo.toml": f'dir = "runs/typo"\n{GRPO}'.replace("num_generations", "num_generatons"),
}
WALKS = {
    "smallest GRPO run": ("all", "run", "grpo.toml"),
    "one warm GRPO update": ("warm", "run", "warm.toml"),
    "smallest reward run": ("all", "run", "rm.toml"),
    "a typo, to its message": ("all", "check", "typo.toml"),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.walk")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--files", action="store_true")
    parser.add_argument("--source", action="store_true")
    options = parser.parse_args()
    last = json.loads(LAST.read_text()) if LAST.exists() else {}
    now: dict[str, int] = {}
    for title, walk in ({} if options.source else walks()).items():
        now |= {f"{title}, {unit}": walk[unit] for unit in ("files", "functions", "lines")}
        for name, lines in walk["by_file"] if options.files else []:
            print(f"{title}: {lines:5} {name}")
    now |= source.figures(ROOT)
    print(table(now, last))
    if options.record:
        LAST.write_text(json.dumps(last | now, indent=2) + "\n")
        return
    risen = [name for name, figure in now.items() if name in last and figure > last[name] * TOLERANCE]
    if risen:
        print(f"over 2 % higher than in {LAST.relative_to(ROOT)}: {'; '.join(risen)}.")
        print("If that is meant, `make walk RECORD=1` writes the file, for the same commit.")
        raise SystemExit(1)


def walks() -> dict[str, dict[str, Any]]:
    """Run the four commands. Ends with what stderr has where one fails or enters nothing of ours."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_inputs(directory)
        for title, (part, *command) in WALKS.items():
            out = directory / "out.json"
            child = [
                sys.executable,
                str(Path(__file__).with_name("trace.py")),
                str(ROOT),
                str(out),
                part,
                *command,
            ]
            environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
            ended = subprocess.run(
                child, cwd=directory, env=environment, capture_output=True, text=True, check=False
            )
            walk = json.loads(out.read_text()) if out.exists() else {"exit": ended.returncode, "functions": 0}
            if walk["exit"] != (2 if command[0] == "check" else 0) or not walk["functions"]:
                raise SystemExit(
                    f"{title}: exit code {walk['exit']}, {walk['functions']} functions\n{ended.stderr}"
                )
            out.unlink()
            found[title] = walk
    return found


def write_inputs(directory: Path) -> None:
    """Write a tokenizer, rows, a reward and the pipelines."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(directory / "tok")
    prompts = [{"prompt": f"a b {letter}"} for letter in "cdefghijklmn"]
    rows = {
        "prompts.jsonl": prompts,
        "pairs.jsonl": [{**row, "chosen": "d e", "rejected": "f g"} for row in prompts],
    }
    for name, each in rows.items():
        (directory / name).write_text("".join(json.dumps(row) + "\n" for row in each))
    for name, text in FILES.items():
        (directory / name).write_text(text)


def table(now: dict[str, int], last: dict[str, int]) -> str:
    """Return the figures as lines: now, last time, and by how much they rose."""
    lines = [f"{'':46}{'now':>9}{'last':>9}"]
    for name, figure in now.items():
        before = last.get(name)
        change = f"{figure / before - 1:+8.1%}" if before and figure != before else ""
        lines.append(f"{name:46}{figure:9,}{'' if before is None else f'{before:9,}'}{change}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
