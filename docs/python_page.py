"""Write the page of Python names by task, for `generate.py`: signatures and first sentences of docstrings.

Every promised name, a line of tests/shared/public_surface.txt, stands under exactly one task here.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from rlhf_core.config import Options
from rlhf_core.contracts import Kind

SURFACE = Path(__file__).resolve().parents[1] / "tests/shared/public_surface.txt"
WIDTH = 120


class Task(NamedTuple):
    title: str
    about: str
    names: str
    """Without their modules, separated by spaces: names may move from room to room."""


TASKS = (
    Task(
        "Register a plugin",
        "[Hooks](components.md#hooks) are called on objects that carry `hookimpl`. A constant of a kind is what "
        "`registry.add` takes first: [components](components.md).",
        "hookimpl Registry installed_registry Kind Options Component InputError RunError ACTION ADVANTAGE ATTENTION "
        "DATASET ENVIRONMENT LAYER EXPERTS LOGGER MODEL OPTIMIZER PAIRWISE_LOSS POLICY_LOSS REWARD SAMPLER TRAINER "
        "DPO_LOSS KTO_LOSS DIVERGENCE",
    ),
    Task(
        "Translate names of other libraries",
        "The hook `rlhf_translate` answers with these for keys that a trainer does not know.",
        "Alias NoEffect Refused",
    ),
    Task(
        "Open a model",
        "",
        "load_model Model ModelFamily Definition Rows make_mesh",
    ),
    Task(
        "Make rows",
        "[Rows](../explanation/update.md) says how they are laid out, [Data](data.md) which columns are read.",
        "Source Example Dropped with_values Examples Tree Trees pack Packed Layout",
    ),
    Task(
        "Collect completions",
        "[Write a trainer that samples](../how-to/write_a_trainer_that_samples.md) uses them.",
        "open_rewards open_collector RolloutCollector RolloutConfig RolloutOptions RolloutSteps RolloutUpdates Reading "
        "Rollout FixedPrompts choose_rollout_rows SamplingTest SamplingTestOptions "
        "Advantage AdvantageInputs group_advantages SamplerInputs SamplingOptions Rollouts "
        "WeightedReward Reward RewardInputs Environment Turn EnvironmentOptions",
    ),
    Task(
        "Score completions without a model",
        "[Rewards](rewards.md#built-in) describes them.",
        "exact_match numeric_answer MathVerify Regex length SoftOverlong repetition Http Judge",
    ),
    Task(
        "Compute log-probabilities and scores",
        "",
        "trained_logps trained_moments Moments trained_scores sequence_scores TreeReader token_logps "
        "completion_logps compute_per_token_logps get_per_token_logps "
        "get_per_token_logps_and_entropies Head token_divergences",
    ),
    Task(
        "Write an objective",
        "It returns the loss as a sum and a count, and metrics: [the step](../explanation/update.md#the-step).",
        "Objective trained_weight trained_sequence sequence_sums loss_output LossOutput PolicyInputs PairInputs "
        "DPOInputs KTOInputs PolicyLoss PairwiseLoss named_loss policy_loss pairwise_loss dpo_loss kto_loss Mean Sum "
        "Max Min Metric fetch_metrics",
    ),
    Task(
        "Run the loop",
        "",
        "Trainer TrainerConfig define_trainer Build Action Context Evaluate Forecast Stage fit UpdateSource "
        "ExampleUpdates Update empty_batches HeldOut EvaluationMetrics "
        "make_optimizer TrainState create_state Reference put_rows over_pieces PaddedObjective "
        "padded_rows training_step evaluation_step grpo_step",
    ),
    Task(
        "Read a run",
        "[Run directories](runs.md) says what is in them.",
        "open_run RunDirectory StageDirectory Damaged",
    ),
    Task("Save and score", "", "Artifact save_model write_atomic Scorer"),
    Task(
        "Run trainers and pipelines from Python",
        "",
        "run_pipeline python_trainer SFTConfig SFTTrainer RewardConfig RewardTrainer GRPOConfig "
        "GRPOTrainer DPOConfig DPOTrainer OnlineDPOConfig OnlineDPOTrainer KTOConfig KTOTrainer DistillConfig "
        "DistillTrainer",
    ),
    Task(
        "Test your plugin",
        "",
        "check_advantage check_environment check_logger check_model check_pairwise_loss "
        "check_policy_loss check_reward check_trainer texts pairs prompts tokenizer MODEL_TABLE "
        "lying_sampler LIES",
    ),
    Task(
        "Describe a model family",
        "[Add a model family](../how-to/add_a_model_family.md) uses them; "
        "[rlhf-families](../../plugins/families/README.md) uses nothing else.",
        "Architecture decoder_family ConfigFields DecoderConfig Layer Recurrent LayerContext Aux RowReader "
        "previous_tokens across_pieces Attention MLP Experts Linear RMSNorm Embedding ACTIVATIONS rotate open_weights "
        "save_tensors paths cached",
    ),
    Task(
        "Write kernels",
        "[Kernels](../how-to/add_a_model_family.md#kernels) has the shapes; "
        "[rlhf-kernels](../../plugins/kernels/README.md) uses nothing else.",
        "attend attend_blocks Blocks visible_blocks visits seen_pairs MASKED sinks_gradient AttentionPart platform "
        "mesh_of_rows row_axes",
    ),
)


class Promise(NamedTuple):
    module: str
    name: str
    thing: Any


def promises() -> list[Promise]:
    """Every promised name, without methods; a name of several modules once, with the shortest."""
    found: dict[tuple[str, int], Promise] = {}
    for line in SURFACE.read_text(encoding="utf-8").splitlines():
        path = re.split(r"[(:]", line)[0]
        if not line or path.startswith("hook "):
            continue
        module, name = _module_and_name(path.split("."))
        promise = Promise(module.__name__, name, getattr(module, name))
        key = name, id(promise.thing)
        if key not in found or len(promise.module) < len(found[key].module):
            found[key] = promise
    return [*found.values()]


def by_task(named: Iterable[Promise]) -> dict[str, list[Promise]]:
    """{title of a task: promises, in its order}. Raises ValueError for names with no task, or with two."""
    tasks: dict[str, list[str]] = defaultdict(list)
    for task in TASKS:
        for name in task.names.split():
            tasks[name].append(task.title)
    if several := [name for name, titles in tasks.items() if len(titles) > 1]:
        raise ValueError(f"under several tasks of docs/python_page.py: {', '.join(several)}")
    named = sorted(named, key=lambda promise: [*tasks].index(promise.name) if promise.name in tasks else -1)
    if without := [f"{each.module}.{each.name}" for each in named if each.name not in tasks]:
        raise ValueError(f"promised, but under no task of docs/python_page.py: {', '.join(without)}")
    return {
        task.title: [promise for promise in named if tasks[promise.name] == [task.title]] for task in TASKS
    }


def unpromised() -> list[str]:
    """Names under a task that are not promised."""
    promised = {promise.name for promise in promises()}
    return [name for task in TASKS for name in task.names.split() if name not in promised]


def parts() -> Iterator[str]:
    """Headings and lists of names."""
    tasks = by_task(promises())
    for task in TASKS:
        yield f"## {task.title}"
        yield task.about
        kinds = [promise for promise in tasks[task.title] if isinstance(promise.thing, Kind)]
        yield "\n".join(_item(promise) for promise in tasks[task.title] if promise not in kinds)
        if kinds:
            yield "Kinds: " + ", ".join(f"`{promise.module}.{promise.name}`" for promise in kinds) + "."


def joined(text: str) -> str:
    return " ".join(text.split())


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _module_and_name(path: list[str]) -> tuple[ModuleType, str]:
    """The module of a dotted name, and the part after it; of modules the last part is the name."""
    for length in range(len(path) - 1, 0, -1):
        try:
            return importlib.import_module(".".join(path[:length])), path[length]
        except ModuleNotFoundError:
            continue
    raise ValueError(f"{'.'.join(path)}: no such module")


def _item(promise: Promise) -> str:
    """`module.name(signature)`: first sentence. Methods."""
    thing = promise.thing
    call = _signature(thing) if _is_called(thing) else ""
    about = _sentence(thing) if inspect.isroutine(thing) or inspect.isclass(thing) else _constant(promise)
    methods = ", ".join(f"`{name}{_signature(method)}`" for name, method in _methods(thing))
    text = f"- `{promise.module}.{promise.name}{call}`" + (f": {about}" if about else "")
    text += f" Methods: {methods}." if methods else ""
    return textwrap.fill(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _is_called(thing: Any) -> bool:
    """Whether a signature says something: not of protocols, exceptions and configurations, whose fields have pages."""
    if not inspect.isclass(thing):
        return callable(thing) and inspect.isroutine(thing)
    return not (issubclass(thing, (Exception, Options, dict)) or getattr(thing, "_is_protocol", False))


def _signature(function: Any) -> str:
    """Names, kinds and whether there is a default; types and values are in the code."""
    signature = inspect.signature(function)
    plain = [
        p.replace(annotation=p.empty, default=p.default if _is_simple(p.default) else ...)
        for p in signature.parameters.values()
        if p.name not in ("self", "cls")
    ]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty)).replace(
        "=Ellipsis", "=…"
    )


def _is_simple(value: Any) -> bool:
    return value is inspect.Parameter.empty or isinstance(value, bool | int | float | str | None)


def _sentence(thing: Any) -> str:
    """The first sentence of a docstring; of what dataclass or NamedTuple made up, nothing."""
    text = (vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__) or ""
    if not text and inspect.isclass(thing):
        text = getattr(vars(thing).get("__call__"), "__doc__", None) or ""  # of a protocol
    if inspect.isclass(thing) and text.startswith(f"{thing.__name__}("):
        return "a struct."
    first = joined(inspect.cleandoc(text).split("\n\n")[0])
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`{\[])", first)[0]


def _constant(promise: Promise) -> str:
    """What stands below the constant in the module that defines it; of a module, its docstring."""
    if inspect.ismodule(promise.thing):
        return _sentence(promise.thing)
    tree = ast.parse(inspect.getsource(importlib.import_module(promise.module)))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and promise.name in [alias.name for alias in node.names]:
            return _constant(promise._replace(module=str(node.module)))
    body = tree.body
    for statement, below in itertools.pairwise(body):
        targets = (
            statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        )
        if promise.name in [getattr(target, "id", None) for target in targets] and isinstance(
            below, ast.Expr
        ):
            return joined(str(getattr(below.value, "value", "")))
    return "a constant."


def members(thing: Any) -> dict[str, Any]:
    """The attributes of a class, and those of the classes of its own package that it extends."""
    package = thing.__module__.split(".")[:2]
    bases = [base for base in reversed(thing.__mro__) if base.__module__.split(".")[:2] == package]
    return {name: value for base in bases for name, value in vars(base).items()}


def _methods(thing: Any) -> Iterator[tuple[str, Any]]:
    """Its own public methods that are documented."""
    if inspect.isclass(thing) and not issubclass(thing, Options):
        for name, method in members(thing).items():
            function = getattr(method, "__func__", method)
            if not name.startswith("_") and inspect.isfunction(function) and function.__doc__:
                yield name, function
