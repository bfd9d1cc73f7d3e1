"""The recipes: which pipeline each runs, with what changed, and what it runs a second time."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import data

HERE = Path(__file__).resolve().parent
QUICKSTART = HERE.parents[1] / "plugins/tools/rlhf_tools/demo"


@dataclass(frozen=True)
class Again:
    """A second run of a recipe that must end with the same models: with other settings, or interrupted."""

    sets: tuple[str, ...] = ()
    killed_after: int | None = None
    """The update of the last stage after which the process is killed, and started anew."""


@dataclass(frozen=True)
class Recipe:
    """A pipeline with the data that `generate` writes for a seed.

    stages: those whose metrics are held; compared: those whose models a second run must end with, too. held_to: the
    recipe whose intervals these are, if not its own. devices: how many share the parameters.
    """

    name: str
    about: str
    files: tuple[Path, ...]
    stages: tuple[str, ...] = ("policy",)
    sets: tuple[str, ...] = ()
    again: Again | None = None
    compared: tuple[str, ...] = ("base", "policy")
    generate: Callable[[Path, int], None] = data.generate
    devices: int = 1
    held_to: str = ""

    @property
    def trainers(self) -> dict[str, str]:
        """{stage: its trainer}."""
        pipeline = tomllib.loads("\n".join(file.read_text(encoding="utf-8") for file in self.files))
        return {stage["name"]: stage["trainer"] for stage in pipeline["stage"]}

    def write(self, directory: Path, seed: int) -> Path:
        """Write data, rewards and pipeline into a run's directory; the pipeline file."""
        self.generate(directory / "data", seed)
        (directory / "rewards.py").write_bytes((HERE / "rewards.py").read_bytes())
        pipeline = directory / "pipeline.toml"
        mesh = f"mesh = {{ fsdp = {self.devices} }}" if self.devices > 1 else ""
        pipeline.write_text(
            "\n".join((mesh, *(file.read_text(encoding="utf-8") for file in self.files))), encoding="utf-8"
        )
        return pipeline


def quickstart_data(directory: Path, seed: int) -> None:
    """The quickstart's data at a quarter, and the right replies to its held-out orders."""
    from rlhf_tools.demo.generate import Sizes, generate
    from rlhf_tools.demo.judge import parse_order

    sizes = Sizes(2048, 4096, 512, 64, 16, 64)
    generate(directory, seed=seed, sizes=sizes)
    orders = [parse_order(row["prompt"]) for row in data.read_rows(directory / "prompts.heldout.jsonl")]
    data.write_rows(
        directory / "right.heldout.jsonl",
        ({"prompt": order.prompt, "completion": f" {order.reply()}"} for order in orders),
    )


def _policy(loss: str, about: str, options: str = "") -> Recipe:
    """One of the policy losses, with two updates on each half of a rollout, so that ratios leave 1."""
    table = f'{{ name = "{loss}"{options} }}'
    return Recipe(loss, about, (BASE, HERE / "policy.toml"), sets=(f"policy.loss={table}",))


def _pairs(loss: str, about: str, changed: str) -> Recipe:
    """One of the losses of pairs that need no reference, on the pairs of `dpo`, with one other setting."""
    return Recipe(loss, about, (BASE, HERE / "dpo.toml"), sets=(f'policy.loss="{loss}"', f"policy.{changed}"))


BASE = HERE / "base.toml"
UPDATES = (BASE, HERE / "updates.toml")
RECIPES = {
    each.name: each
    for each in (
        Recipe(
            "quickstart",
            "reward model to policy: the quickstart, with a tenth of its updates",
            (QUICKSTART / "quickstart.toml",),
            stages=("base", "rm", "policy"),
            sets=(
                "base.max_training_steps=128",
                "rm.max_training_steps=128",
                "policy.max_training_steps=24",
                *(f"{stage}.log_steps=1" for stage in ("base", "rm", "policy")),
            ),
            generate=quickstart_data,
        ),
        _policy("grpo", "ratios clipped token by token, the mean over completions"),
        _policy("bnpo", "the mean over an update's tokens"),
        _policy("dr_grpo", "divided by a fixed length"),
        _policy("dapo", "clipped higher above", ", epsilon_high = 0.28"),
        _policy("cispo", "weights capped, no gradient cut off", ", epsilon_high = 5.0"),
        _policy("gspo", "ratios of whole completions", ", epsilon = 0.03, epsilon_high = 0.04"),
        _policy("gspo_token", "the same, with a gradient per token", ", epsilon = 0.03, epsilon_high = 0.04"),
        _policy("sapo", "a smooth gate in place of a clip"),
        Recipe(
            "updates",
            "six updates per rollout; the same models from smaller micro-batches",
            UPDATES,
            stages=("base", "policy"),
            again=Again(sets=("base.gradient_accumulation_steps=4", "policy.gradient_accumulation_steps=4")),
        ),
        Recipe(
            "devices",
            "updates, on two devices that share the parameters",
            UPDATES,
            stages=("base", "policy"),
            devices=2,
            held_to="updates",
        ),
        Recipe(
            "resume",
            "the same bits from a run that was killed within a rollout",
            UPDATES,
            stages=(),
            again=Again(killed_after=14),
        ),
        Recipe("dynamic", "groups of equal rewards are replaced; evaluations", (BASE, HERE / "dynamic.toml")),
        Recipe("lora", "adapters beside a frozen base", (BASE, HERE / "lora.toml")),
        Recipe("reward", "a reward model from pairs", (BASE, HERE / "reward.toml"), stages=("rm",)),
        Recipe("dpo", "a policy from pairs", (BASE, HERE / "dpo.toml")),
        _pairs("simpo", "from pairs without a reference, by means per token", "beta=2.0"),
        _pairs("orpo", "the same, by odds, beside the likelihood of chosen replies", "learning_rate=1e-3"),
        _pairs("cpo", "the same, by sums, beside the likelihood of chosen replies", "beta=0.2"),
        Recipe("kto", "a policy from labels", (BASE, HERE / "kto.toml")),
        Recipe("online_dpo", "a policy from pairs of its own completions", (BASE, HERE / "online.toml")),
    )
}
