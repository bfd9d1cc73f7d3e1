"""Push an exported model to the Hugging Face hub, with a card that says how it was made."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any

from rlhf_core import InputError, RunError
from rlhf_core.artifacts import MANIFEST
from rlhf_core.errors import UNREADABLE
from rlhf_core.hub import is_hub_name, parse
from rlhf_core.runs import StageDirectory, open_run

CARD = "README.md"
WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]
"""Files of an earlier push that this one may not have: a model in one file after one in shards."""
SHOWN = (
    "eval_accuracy",
    "eval_auc",
    "eval_loss",
    "eval_reward",
    "eval_kl",
    "eval_margin",
    "reward",
    "kl",
    "loss",
)
"""Metrics of the card, where the stage has them."""
Z = 1.959964
"""The normal distribution's 97.5 % quantile."""


def push(directory: Path, repository: str, *, private: bool = False, revision: str | None = None) -> str:
    """Upload a directory as a model repository, which is made if it is missing; return the commit's address.

    revision: a branch, which is made if it is missing; None: main. Weights of an earlier push that are not in the
    directory are deleted there, everything else is kept. Raises InputError without a login, for a name that the hub
    refuses, and if the repository is public where `private` is asked for; RunError if the upload fails.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError

    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        if private and not api.model_info(repository).private:
            raise InputError(
                f"--private: {repository} is public on the hub; change that there, or leave --private out"
            )
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=directory,
            revision=revision,
            commit_message="Upload a model with rlhf export",
            delete_patterns=WEIGHTS,
        )
    except (LocalTokenNotFoundError, HFValidationError) as error:
        raise InputError(
            f"--push {repository}: {_line(error)}; to log in: hf auth login, or set HF_TOKEN"
        ) from error
    except InputError:
        raise
    except Exception as error:  # the hub's answer, or no connection, in the words of several libraries
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            raise InputError(
                f"--push {repository}: the hub refuses it ({_line(error)}); to log in: hf auth login, or set HF_TOKEN"
            ) from error
        raise RunError(
            f"--push {repository}: the upload failed: {_line(error)}; nothing here is lost: push again"
        ) from error
    return str(commit.commit_url)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


def model_card(source: Path, exported: Path, repository: str) -> str:
    """Write a card of an exported model from its manifest and the stages that made it.

    source: the artifact, or a directory that is none, of which little is known. exported: the written directory, whose
    README.md, which says how others score with a reward model, becomes a part of the card. Raises InputError for an
    adapter whose base nobody else has.
    """
    manifest = _json(source / MANIFEST)
    reward = manifest.get("kind") == "reward_model"
    stages = list(_ancestors(source.parent.parent)) if manifest else []
    stage = stages[0].spec if stages else {}
    base = _base_model(stages)
    adapter = _base_of_adapter(exported, repository)
    about = "A reward model" if reward else "A language model"
    if stage:
        about += f", made by the stage `{stage['name']}` (trainer `{stage['trainer']}`)"
    if adapter:
        about += f", an adapter of {adapter}"
    title = repository.partition("/")[2] or repository
    lines = _front_matter(reward=reward, trainer=stage.get("trainer"), base=base, adapter=adapter)
    lines += [f"# {title}", "", f"{about}.", ""]
    if stages:
        lines += _history(stages, manifest.get("versions", {}))
        shown = _metric_rows(stages[0])
        if shown:
            lines += ["## Metrics", "", "| metric | value | 95 % interval |", "|---|---|---|", *shown, ""]
    lines += ["## How to load it", ""]
    if reward and (exported / CARD).is_file():
        text = (exported / CARD).read_text(encoding="utf-8").partition("\n")[2].strip()
        return "\n".join(lines) + text.replace('"MODEL"', json.dumps(repository)) + "\n"
    return "\n".join([*lines, *_loading(repository, adapter)]) + "\n"


def _front_matter(*, reward: bool, trainer: str | None, base: str | None, adapter: str | None) -> list[str]:
    """Return the lines that the hub reads of a card."""
    tags = ["rlhf"]
    if trainer is not None:
        tags.append(trainer)
    front: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-classification" if reward else "text-generation",
        "tags": tags,
    }
    if base:
        front["base_model"] = base
    return ["---", *(f"{key}: {json.dumps(value)}" for key, value in front.items()), "---", ""]


def _base_model(stages: Sequence[StageDirectory]) -> str | None:
    """Return the hub's name of the model that stages, the last one first, started from; None where it has none."""
    for stage in reversed(stages):
        name = _hub_name(stage.spec)
        if name:
            return name
    return None


def _base_of_adapter(exported: Path, repository: str) -> str | None:
    """Return the name of an adapter's base model; None for a whole model. Raises InputError for one that is here."""
    base: str | None = _json(exported / "adapter_config.json").get("base_model_name_or_path")
    if base and (Path(base).is_absolute() or (exported / base).exists() or base.startswith(".")):
        raise InputError(
            f"--push {repository}: the adapter's base model is only on this machine: add --merge, or push the "
            "base first and give its name on the hub as --base"
        )
    return base


def _history(stages: Sequence[StageDirectory], versions: Mapping[str, str]) -> list[str]:
    """Return the lines about the stages, the last one first, that made a model."""
    return [
        *(
            "## How it was made",
            "",
            "| stage | trainer | from | data | loss | updates |",
            "|---|---|---|---|---|---|",
        ),
        *(_stage_row(stage) for stage in reversed(stages)),
        *("", "Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".", ""),
    ]


def _loading(repository: str, adapter: str | None) -> Iterator[str]:
    yield "```python"
    yield "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
    yield f'tokenizer = AutoTokenizer.from_pretrained("{repository}")'
    yield f'model = AutoModelForCausalLM.from_pretrained("{repository}")'
    yield "```\n"
    if adapter:
        yield f"transformers loads the adapter with its base where peft is installed; vLLM: `vllm serve {adapter} "
        yield f"--enable-lora --lora-modules policy={repository}`."
    else:
        yield f"vLLM: `vllm serve {repository}`. With rlhf: `rlhf generate {repository} --prompt …`."


def _ancestors(stage: Path) -> Iterator[StageDirectory]:
    """Yield the stage in a directory and those of its run that its models come from, each once."""
    waiting = [stage]
    seen = set()
    while waiting:
        directory = waiting.pop(0)
        if directory in seen or not (directory / "stage.json").is_file():
            continue
        seen.add(directory)
        (found,) = open_run(directory, damaged=lambda error: None).stages
        if not found.spec:
            continue
        yield found
        config = found.spec["config"]
        models = [config.get("model"), *(reward.get("model") for reward in config.get("rewards") or ())]
        names = [name.partition(".")[0] for name in models if isinstance(name, str)]
        waiting += [directory.parent / name for name in names]


def _hub_name(record: Mapping[str, Any]) -> str | None:
    """Return OWNER/NAME of the model of the hub that a stage starts from; None for a path or another stage's output."""
    model = record["config"].get("model")
    if is_hub_name(model):
        return parse(model).repository
    of_hub = isinstance(model, str) and model.count("/") == 1 and not model.startswith(".")
    return model if of_hub and not Path(model).exists() else None


def _stage_row(stage: StageDirectory) -> str:
    config = stage.spec["config"]
    model = config.get("model")
    origin = f"a fresh {model.get('model_type', 'model')}" if isinstance(model, Mapping) else _named(model)
    loss = config.get("loss")
    loss_name = ""
    if isinstance(loss, Mapping):
        loss_name = f"`{loss['name']}`"
    elif stage.trainer == "sft":
        loss_name = "next token"
    cells = (
        f"`{stage.dir.name}`",
        f"`{stage.trainer}`",
        origin,
        ", ".join(_data_names(config.get("train_data"))),
        loss_name,
        str(stage.plan.get("updates", "")),
    )
    return f"| {' | '.join(cells)} |"


def _named(value: Any) -> str:
    """Name a model or a file without its place on this machine."""
    text = str(value)
    return f"`{PurePath(text).name if PurePath(text).is_absolute() else text}`"


def _data_names(data: Any) -> Iterator[str]:
    for each in data if isinstance(data, list) else [data]:
        if isinstance(each, Mapping):
            each = each.get("path") or each.get("name")
        if each is not None:
            yield _named(each)


def _metric_rows(stage: StageDirectory) -> list[str]:
    """Rows of the last metrics; shares of pairs have Wilson's interval (Wilson 1927)."""
    metrics = stage.spec.get("results", {}).get("metrics", {})
    pairs = 0
    for update in list(stage.evaluations)[-1:]:
        pairs = int(sum(stage.evaluations[update].get("scores", {}).get("chosen", ())))
    rows = []
    for name in SHOWN:
        value = metrics.get(name)
        if not isinstance(value, float):
            continue
        interval = ""
        if name == "eval_accuracy" and pairs:
            share = value
            z = Z**2 / pairs
            half = Z * math.sqrt(share * (1 - share) / pairs + z / (4 * pairs)) / (1 + z)
            centre = (share + z / 2) / (1 + z)
            interval = f"[{centre - half:.4f}, {centre + half:.4f}], {pairs:,} pairs"
        rows.append(f"| {name} | {value:.4g} | {interval} |")
    return rows


def _json(path: Path) -> dict[str, Any]:
    with suppress(OSError, *UNREADABLE):
        found = json.loads(path.read_bytes())
        return found if isinstance(found, dict) else {}
    return {}
