"""Time TRL on one of the works, in an environment of its own (requirements-trl.txt).

    TRL_PYTHON benchmarks/speed/trl_runner.py --work W1 [--model 50m] [--steps 10]

Every work goes through TRL's own trainer. Attention is PyTorch's `sdpa`, the optimizer its fused AdamW, and threads are
as many as there are cores. --torch-compile turns on what TRL's users can turn on as well.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import machine
import numpy as np
import torch
import works
from datasets import Dataset
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer

Row = dict[str, Any]


class Clock(TrainerCallback):
    """When each update was over, and the first one by the wall clock."""

    def __init__(self) -> None:
        self.over: list[float] = []
        self.first_at = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.over.append(time.perf_counter())
        self.first_at = self.first_at or time.time()

    def row(self) -> Row:
        return {"seconds": np.diff(self.over)[works.WARM_UP :].tolist(), "first_step_at": self.first_at}


def shared(directory: Path, given: argparse.Namespace) -> Row:
    """Return the settings of both trainers."""
    return {
        "output_dir": str(directory / "run"),
        "seed": works.SEED,
        "learning_rate": works.LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False,
        "disable_dropout": True,
        "bf16": False,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "torch_compile": given.torch_compile,
        "logging_steps": 10**9,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def saved(task: works.Task, kind: type, directory: Path, *, stops: bool, **more: Any) -> tuple[str, Any]:
    """A fresh model in a directory, where TRL wants it to load it from, and the tokenizer."""
    files = task.tokenizer or works.write_tokenizer(directory / "tokenizer", task.model.vocab, stops=stops)
    tokenizer = AutoTokenizer.from_pretrained(files)
    config = LlamaConfig(**task.model.config, **more, eos_token_id=tokenizer.eos_token_id, pad_token_id=1)
    kind(config).save_pretrained(directory / "model")
    return str(directory / "model"), tokenizer


LOADING = {"dtype": "float32", "attn_implementation": "sdpa"}


def reward_trainer(
    task: works.Task, given: argparse.Namespace, directory: Path, rows: Any, **more: Any
) -> Any:
    """Its constructor loads the model and tokenises; the clock starts before that."""
    model, tokenizer = saved(task, LlamaForSequenceClassification, directory, stops=True, num_labels=1)
    began = time.perf_counter()
    trainer = RewardTrainer(
        model=model,
        args=RewardConfig(
            **shared(directory, given),
            per_device_train_batch_size=works.PAIRS,
            center_rewards_coefficient=0.1,  # our default
            model_init_kwargs=LOADING,
            **more,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    return trainer, began


def run_reward(task: works.Task, given: argparse.Namespace, directory: Path) -> Row:
    """W1."""
    names = ("chosen_ids", "rejected_ids")
    pairs = [works.token_ids(2, works.PAIR_TOKENS, task.model.vocab, i) for i in range(8 * works.PAIRS)]
    rows = [dict(zip(names, pair.tolist(), strict=True)) for pair in pairs]
    steps = 1 + works.WARM_UP + task.steps
    trainer, _ = reward_trainer(task, given, directory, rows, max_steps=steps, max_length=works.PAIR_TOKENS)
    clock = Clock()
    trainer.add_callback(clock)
    trainer.train()
    return clock.row()


def run_epoch(task: works.Task, given: argparse.Namespace, directory: Path) -> Row:
    """W6: timed from the texts as Python objects until the trained model is saved, loading the model included."""
    rows, longest = works.epoch_rows(task)
    trainer, began = reward_trainer(task, given, directory, rows, num_train_epochs=1, max_length=longest)
    trainer.train()
    trainer.save_model(str(directory / "trained"))
    return {"seconds": [time.perf_counter() - began], "updates": trainer.state.global_step}


def grpo_trainer(
    task: works.Task, given: argparse.Namespace, directory: Path, steps: int, **more: Any
) -> Any:
    model, tokenizer = saved(task, LlamaForCausalLM, directory, stops=False)
    completions = works.PROMPTS * works.GROUP
    prompts = works.token_ids(64, works.PROMPT, task.model.vocab)
    return GRPOTrainer(
        model=model,
        args=GRPOConfig(
            **shared(directory, given),
            max_steps=steps,
            per_device_train_batch_size=completions,
            steps_per_generation=1,
            num_iterations=1,
            num_generations=works.GROUP,
            max_completion_length=works.COMPLETION,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            loss_type="dapo",
            beta=task.beta,
            mask_truncated_completions=False,
            model_init_kwargs=LOADING,
        ),
        reward_funcs=more.pop("reward", works.reward),
        train_dataset=Dataset.from_dict({"prompt": [works.words(ids) for ids in prompts]}),
        processing_class=tokenizer,
        **more,
    )


def run_update(task: works.Task, given: argparse.Namespace, directory: Path) -> Row:
    """W2: the trainer's step with the same completions every time, by its `rollout_func`."""
    completions = works.token_ids(works.PROMPTS * works.GROUP, works.COMPLETION, task.model.vocab, 1).tolist()

    def same(prompts: list[str], trainer: Any) -> Row:
        ids = trainer.processing_class(prompts)["input_ids"]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}

    clock = Clock()
    steps = 1 + works.WARM_UP + task.steps
    trainer = grpo_trainer(task, given, directory, steps, rollout_func=same, callbacks=[clock])
    trainer.train()
    return clock.row()


def run_rollouts(task: works.Task, given: argparse.Namespace, directory: Path) -> Row:
    """W3: the trainer's generation, without the rest of its step."""
    trainer = grpo_trainer(task, given, directory, 1)
    prompts = works.token_ids(64, works.PROMPT, task.model.vocab)
    trainer.model.train()
    seconds, first_at = [], 0.0
    for step in range(1 + works.WARM_UP + task.steps):
        chosen = [prompts[(works.PROMPTS * step + i) % len(prompts)] for i in range(works.PROMPTS)]
        repeated = [ids.tolist() for ids in chosen for _ in range(works.GROUP)]
        began = time.perf_counter()
        completions, _ = trainer._generate_single_turn(repeated, None, {}, works.GROUP)
        seconds.append(time.perf_counter() - began)
        first_at = first_at or time.time()
        if min(map(len, completions)) < works.COMPLETION:
            raise SystemExit("a completion is shorter than it should be")
    return {"seconds": seconds[1 + works.WARM_UP :], "first_step_at": first_at}


def run_whole(task: works.Task, given: argparse.Namespace, directory: Path) -> Row:
    """W4: as ours, from one call of the reward function to the next."""
    called: list[float] = []

    def reward(completions: list[str], **_: Any) -> list[float]:
        called.append(time.perf_counter())
        return works.reward(completions)

    clock = Clock()
    steps = 2 + works.WARM_UP + task.steps
    grpo_trainer(task, given, directory, steps, reward=reward, callbacks=[clock]).train()
    return {"seconds": np.diff(called)[1 + works.WARM_UP :].tolist(), "first_step_at": clock.first_at}


def run_log_probs(task: works.Task, given: argparse.Namespace, directory: Path) -> Row:
    """W5: the log-probabilities as GRPOTrainer computes them, and their gradient."""
    trainer = grpo_trainer(task, given, directory, 1)
    model = trainer.model.train()
    ids = torch.tensor(works.token_ids(works.SEQUENCES, works.LENGTH, task.model.vocab).astype(np.int64))
    extra, seconds, first_at = None, [], 0.0
    for _ in range(1 + works.WARM_UP + task.steps):
        began = time.perf_counter()
        logps = trainer._get_per_token_logps_and_entropies(
            model, ids, torch.ones_like(ids), works.LENGTH - 1
        )[0]
        (-logps.mean()).backward()
        seconds.append(time.perf_counter() - began)
        first_at = first_at or time.time()
        model.zero_grad(set_to_none=True)
        del logps
        extra = extra or machine.Extra()
    assert extra is not None
    return {"seconds": seconds[1 + works.WARM_UP :], "extra_bytes": extra.read(), "first_step_at": first_at}


RUNS = {
    "W1": run_reward,
    "W2": run_update,
    "W3": run_rollouts,
    "W4": run_whole,
    "W5": run_log_probs,
    "W6": run_epoch,
    "W6hh": run_epoch,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time TRL.")
    works.add_arguments(parser)
    parser.add_argument("--torch-compile", action="store_true", help="transformers' option of that name")
    given = parser.parse_args()
    task = works.task_of(given)
    torch.set_num_threads(os.cpu_count() or 1)
    torch.manual_seed(works.SEED)
    with tempfile.TemporaryDirectory(prefix="speed-") as directory:
        found = RUNS[task.work](task, given, Path(directory))
    side = torch.ones(machine.PRODUCT, machine.PRODUCT)
    peak = machine.peak_rss()
    rate = machine.product_rate(lambda: torch.mm(side, side))
    row = {**found, "peak_rss_bytes": peak, "matmul_flops_per_second": rate}
    print(json.dumps({**row, "versions": works.versions("trl", "torch", "transformers")}))


if __name__ == "__main__":
    main()
