"""Open what prepare.py left with transformers and peft, and make adapters with peft: in PyTorch's environment.

    python benchmarks/interop/torch_side.py [--seed 0] [--case llama …]

Reads `ours.npz` of every runs/interop/seedN/CASE and writes there `torch.json`, what was compared, and the adapters
that peft made, `peft-KIND-N`, with what they give in `torch.npz`.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import peft
import task
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

torch.set_num_threads(1)
KINDS = {"lm": AutoModelForCausalLM, "score": AutoModelForSequenceClassification}


def opened(kind: str, path: Path, adapter: Path | None = None) -> Any:
    """The model as its users open it; kind: "lm" or "score"."""
    options = {"num_labels": 1} if kind == "score" else {}
    model = KINDS[kind].from_pretrained(path, dtype=torch.float32, **options)
    if kind == "score" and model.config.pad_token_id is None:  # of a language model's config.json
        model.config.pad_token_id = AutoTokenizer.from_pretrained(path).pad_token_id
    return (model if adapter is None else peft.PeftModel.from_pretrained(model, adapter)).eval()


@torch.no_grad()
def outputs(model: Any, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Logits [B, T, V], or [B, 1] of a reward model."""
    given = {"input_ids": torch.tensor(ids).long(), "attention_mask": torch.tensor(mask).long()}
    return model(**given).logits.numpy()


@torch.no_grad()
def everywhere(model: Any, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Compute the reward head's numbers at every position, [B, T]; transformers pools one per row."""
    given = {"input_ids": torch.tensor(ids).long(), "attention_mask": torch.tensor(mask).long()}
    return model.score(model.model(**given).last_hidden_state)[..., 0].numpy()


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours.astype(np.float64) - theirs.astype(np.float64)).max())


def padded(place: Path, ids: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The batch as the saved tokenizer pads it, on the right."""
    tokenizer = AutoTokenizer.from_pretrained(place)
    rows = [row[each > 0].tolist() for row, each in zip(ids, mask, strict=True)]
    found = tokenizer.pad({"input_ids": rows}, padding_side="right", return_tensors="np")
    return found["input_ids"], found["attention_mask"]


def reward(place: Path, ours: Any, name: str, model: Any) -> dict[str, Any]:
    """Scores padded on either side, and where they were read."""
    ids, mask = padded(place / name, ours["ids"], ours["mask"])
    expected = ours[name.replace("-", "_")]
    pooled = outputs(model, ids, mask)[:, 0]
    lengths = mask.sum(1)
    turned = np.stack([np.roll(row, len(row) - n) for row, n in zip(ids, lengths, strict=True)])
    shifted = np.stack([np.roll(row, len(row) - n) for row, n in zip(mask, lengths, strict=True)])
    inner = model.base_model.model if isinstance(model, peft.PeftModel) else model
    at = everywhere(inner, ids, mask)
    return {
        "difference": max(
            difference(expected, pooled), difference(expected, outputs(model, turned, shifted)[:, 0])
        ),
        "spread": float(expected.std()),
        "lengths": lengths.tolist(),
        "pooled": (np.abs(at - pooled[:, None]).argmin(1) + 1).tolist(),
    }


def language(ours: Any, name: str, model: Any) -> dict[str, Any]:
    seen = ours["mask"] > 0
    theirs = outputs(model, ours["ids"], ours["mask"])
    return {
        "difference": difference(ours[name][seen], theirs[seen]),
        "spread": float(ours[name][seen].std()),
        "moved": difference(ours["base"][seen], theirs[seen]),
    }


def check(place: Path) -> dict[str, Any]:
    """What is compared, by name."""
    ours = np.load(place / "ours.npz")
    scorer = opened("score", place / "reward")
    named = json.loads((place / "reward" / "config.json").read_text(encoding="utf-8"))["architectures"]
    found = {
        "reward model": reward(place, ours, "reward", scorer)
        | {"class": type(scorer).__name__, "named": named[0]},
        "adapter": language(ours, "adapter", opened("lm", place / "base", place / "adapter")),
        "merged adapter": language(ours, "adapter", opened("lm", place / "merged")),
    }
    adapted = opened("score", place / "base", place / "reward-adapter")
    found["reward adapter"] = reward(place, ours, "reward-adapter", adapted)
    merged = opened("score", place / "reward-merged")
    found["merged reward adapter"] = reward(place, ours, "reward-adapter", merged)
    return found


def adapt(case: str, place: Path, seed: int) -> None:
    """Make peft adapters with a random B instead of zero, and compute their outputs."""
    ours = np.load(place / "ours.npz")
    numbers = {}
    for number, options in enumerate(task.adapters(case).values()):
        for kind, what in (("lm", peft.TaskType.CAUSAL_LM), ("score", peft.TaskType.SEQ_CLS)):
            torch.manual_seed(seed)
            base = opened(kind, place / "base")
            model = peft.get_peft_model(base, peft.LoraConfig(task_type=what, **options)).eval()
            for name, values in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(values, std=0.05)
            directory = place / f"peft-{kind}-{number}"
            shutil.rmtree(directory, ignore_errors=True)
            model.save_pretrained(directory)
            with_it = outputs(model, ours["ids"], ours["mask"])
            numbers[directory.name] = with_it if kind == "lm" else with_it[:, 0]
            with model.disable_adapter():
                without = outputs(model, ours["ids"], ours["mask"])
            numbers[f"{directory.name} without"] = without if kind == "lm" else without[:, 0]
    np.savez(place / "torch.npz", **numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description="Our models in transformers and peft.")
    parser.add_argument("--seed", type=int, nargs="+", default=task.SEEDS)
    parser.add_argument("--case", nargs="+", choices=task.CASES, default=task.CASES)
    arguments = parser.parse_args()
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
    }
    for seed in arguments.seed:
        for case in arguments.case:
            place = task.directory(seed, case)
            if place.exists():
                adapt(case, place, seed)
                found = {"versions": versions, "checks": check(place)}
                (place / "torch.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
