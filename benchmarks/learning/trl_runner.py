"""Train with TRL's GRPOTrainer on the same task, in an environment of its own (requirements-trl.txt).

    python benchmarks/learning/trl_runner.py [--seed 0 1 2]

Appends to results/trl.jsonl the rows that ours.py writes, and leaves the final weights in `trl-dapo` beside our runs.
"""

from __future__ import annotations

import argparse
from typing import Any

import task
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

FILE = task.RESULTS / "trl.jsonl"
LOSS = "dapo"


def config(seed: int) -> GRPOConfig:
    """Return `task`'s settings, and TRL's fields whose defaults differ from ours."""
    completions = task.PROMPTS * task.GROUP
    return GRPOConfig(
        output_dir=str(task.RUNS / f"seed{seed}" / "trl-output"),
        seed=seed,
        max_steps=task.UPDATES,
        per_device_train_batch_size=completions,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_generations=task.GROUP,
        num_iterations=task.ITERATIONS,
        shuffle_dataset=False,
        max_completion_length=task.LONGEST_REPLY,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        loss_type=LOSS,
        **task.LOSSES[LOSS],
        importance_sampling_level="token",
        scale_rewards="group",
        beta=task.BETA,
        use_bias_correction_kl=False,
        mask_truncated_completions=False,
        disable_dropout=True,
        learning_rate=task.LEARNING_RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        weight_decay=0.0,
        max_grad_norm=1.0,
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        use_cpu=True,
        use_vllm=False,
        eval_strategy="steps",
        eval_steps=task.EVALUATION_STEPS,
        eval_on_start=True,
        num_generations_eval=task.EVALUATION_SAMPLES,
        per_device_eval_batch_size=64 * task.EVALUATION_SAMPLES,
        logging_steps=task.EVALUATION_STEPS,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def rows(history: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Return TRL's log, a row per evaluation; entropy, kl and clipped are of the updates since the last one."""
    names = {"entropy": "entropy", "kl": "kl", "clipped": "clip_ratio/region_mean"}
    train = {entry["step"]: entry for entry in history if "entropy" in entry}
    return [
        {"loss": LOSS, "seed": seed, "update": entry["step"], "reward": entry["eval_reward"]}
        | {name: train.get(entry["step"], {}).get(key) for name, key in names.items()}
        for entry in history
        if "eval_reward" in entry
    ]


def train(seed: int) -> list[dict[str, Any]]:
    model = str(task.base(seed))
    sets = [
        Dataset.from_dict({"prompt": task.prompts(seed, held_out=held_out)}) for held_out in (False, True)
    ]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=task.right,
        args=config(seed),
        train_dataset=sets[0],
        eval_dataset=sets[1],
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    trainer.save_model(str(task.RUNS / f"seed{seed}" / "trl-dapo"))
    return rows(trainer.state.log_history, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description="Learning curves of TRL.")
    parser.add_argument("--seed", type=int, nargs="+", default=task.SEEDS)
    for seed in parser.parse_args().seed:
        if not any(row["seed"] == seed for row in task.read(FILE)):
            task.append(FILE, train(seed))


if __name__ == "__main__":
    main()
