"""Components, plugins and callbacks that are refused, and arguments of trainers in Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rlhf_grpo import GRPOConfig, GRPOTrainer
from rlhf_sft import SFTConfig, SFTTrainer

from rlhf_core import hookimpl, plugins
from rlhf_core.config import TrainerConfig
from rlhf_core.contracts import (
    ADVANTAGE,
    DATASET,
    MODEL,
    PAIRWISE_LOSS,
    POLICY_LOSS,
    TRAINER,
    Kind,
    LossOutput,
    PolicyInputs,
    Trainer,
)
from rlhf_core.plugins import Registry
from tests.mistakes.mistake import Mistake, call, file, typed

if TYPE_CHECKING:
    from decimal import Decimal


@dataclass(frozen=True)
class Base:
    def __call__(self, inputs: PolicyInputs) -> LossOutput: ...


@dataclass(frozen=True)
class Misspelt(Base):
    agregation: ClassVar[str] = "sequence_mean"


@dataclass(frozen=True)
class Inherited(Misspelt):
    scale: float = 1.0


@dataclass(frozen=True)
class MisspeltField(Base):
    agregation: str = "sequence_mean"


@dataclass(frozen=True)
class Unread(Base):
    clip: ClassVar[float] = 0.3


@dataclass(frozen=True)
class WrongValue(Base):
    aggregation: ClassVar[str] = "sequence_means"


@dataclass(frozen=True)
class WrongLevel(Base):
    importance_sampling_level: str = "sequences"


@dataclass(frozen=True)
class NoText(Base):
    aggregation: ClassVar[int] = 3


class Plain:
    """Not a dataclass: only an object of it can be registered."""

    agregation = "sequence_mean"

    def __call__(self, inputs: PolicyInputs) -> LossOutput: ...


@dataclass(frozen=True)
class Chosen(Base):
    aggregation: str = "sequence_mean"


@dataclass(frozen=True)
class Tanh(Base):
    temperature: float = 1.0
    betas: tuple[float, ...] = (0.9,)
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError("temperature must be above 0")


def dapo(inputs: PolicyInputs, *, epsilon: float = 0.2, low=0.1, mode="a") -> LossOutput: ...  # type: ignore[no-untyped-def]


def misspelt(inputs: PolicyInputs) -> LossOutput: ...


misspelt.agregation = "sequence_mean"  # type: ignore[attr-defined]


def late(inputs: Any, *, size: Decimal | None = None) -> Any:
    """Has an option whose type only a type checker sees."""


def added(name: str, thing: Any, kind: Kind[Any] = POLICY_LOSS, called: str = "x") -> Mistake:
    """A component that cannot be registered."""
    return call(name, lambda place: Registry().add(kind, called, thing))


def options(name: str, thing: Any, **given: Any) -> Mistake:
    """Options that a component does not take."""

    def get(place: Any) -> None:
        registry = Registry()
        registry.add(POLICY_LOSS, "mine", thing)
        registry.get(POLICY_LOSS, "mine", **given)

    return call(name, get)


def another_kind() -> None:
    registry = Registry()
    registry.add(POLICY_LOSS, "x", dapo)
    registry.add(Kind("policy loss"), "y", dapo)


def evaluated(name: str, *names: Any) -> Mistake:
    """Sets of rows for evaluations, by these names."""
    sets = {each: [{"text": "a"}] for each in (*names, "easy")}
    return call(name, lambda place: SFTTrainer(eval_dataset=sets))


def empty(kind: Kind[Any], name: str) -> Mistake:
    return call(f"{kind.name} {name} of no plugin", lambda place: Registry().get(kind, name))


HOOK = "from rlhf_core import hookimpl\n@hookimpl\n"
REGISTERS = (
    "from rlhf_core import POLICY_LOSS, hookimpl\ndef loss(inputs): ...\n"
    '@hookimpl\ndef rlhf_register(registry):\n    registry.add(POLICY_LOSS, "{name}", loss)\n'
)


def plugin(name: str, source: str) -> Mistake:
    return file(name, "plugin.py", source, "check rm.toml --plugin plugin.py")


def column_of(source: str) -> Callable[[Any], None]:
    """A logger in a file, whose options are wrong in two stages."""

    def make(place: Any) -> None:
        place.write("plugin.py", source)
        place.settings("rm.toml", 'logger = [{ name = "csv_file", columns = 0 }]')

    return make


CSV = """
from dataclasses import dataclass
from rlhf_core import LOGGER, hookimpl

@dataclass(eq=False)
class Csv:
    columns: int = 1

    def __post_init__(self):
        if self.columns < 1:
            raise ValueError(f"columns: expected at least 1, got {self.columns}")

@hookimpl
def rlhf_register(registry):
    registry.add(LOGGER, "csv_file", Csv)
"""


class Decorated:
    @hookimpl
    def rlhf_step_end(self, metrics: dict[str, float]) -> None: ...


class Unknown:
    def rlhf_step_ended(self, step: int) -> None: ...


class OfTrl:
    def on_log(self, args: Any, state: Any, control: Any) -> None: ...


class WrongArgument:
    def rlhf_step_end(self, loss: float) -> None: ...


TWICE = Decorated()


def callbacks(name: str, given: Any) -> Mistake:
    def train(place: Any) -> None:
        config = SFTConfig(model="model", save_directory="run")
        SFTTrainer(config, train_dataset=[{"text": "a"}], callbacks=given).train()

    return call(name, train)


def grpo(name: str, **given: Any) -> Mistake:
    return call(name, lambda place: GRPOTrainer(GRPOConfig(), **given))


SECTIONS = {
    "Components that cannot be registered": [
        added("a dataclass that is not frozen", dataclass(type("Thawed", (), {"__call__": dapo}))),
        added("a class that is no dataclass", type("Plain", (), {"__call__": dapo}), ADVANTAGE),
        added("a dataclass that is not called", dataclass(frozen=True)(type("Mute", (), {})), PAIRWISE_LOSS),
        added("a number", 3),
        added("a trainer as a loss", Trainer(TrainerConfig, {}, print)),
        added("a function as a trainer", dapo, TRAINER),
        added("a class as a model", Tanh, MODEL),
        added("a trainer with another config", Trainer(dict, {}, print), TRAINER),  # type: ignore[arg-type]
        added("an option whose type cannot be read", late),
        added("an option called name", lambda name: name, DATASET),
        added("a name that is empty", dapo, called=""),
        added("a name with a colon", dapo, called="a:b"),
        call("a kind of the name of another", lambda place: another_kind()),
    ],
    "Attributes of components": [
        added("agregation", Misspelt),
        added("agregation, inherited", Inherited),
        added("agregation of an object", Misspelt()),
        added("a field agregation", MisspeltField),
        added("one that nothing reads", Unread),
        added("sequence_means", WrongValue),
        added("sequences", WrongLevel),
        added("a number", NoText),
        added("agregation of a function", misspelt),
        added("agregation of an object of any class", Plain()),
        options("token_means in a file", Chosen, aggregation="token_means"),
    ],
    "Options of components": [
        options("temprature", Tanh, temprature=1.0),
        options("four that are wrong", Tanh, zzz=1, temperature="hot", betas=[0.1, "x"], limit=1.5),
        options("true for a number", Tanh, temperature=True),
        options("one that the class refuses", Tanh, temperature=0.0),
        options("the argument of a call", dapo, inputs=1),
        options("types that defaults have", dapo, low="x", mode=1),
        call("a trainer's", lambda place: plugins.load().registry.get(TRAINER, "sft", x=1)),
        typed("check rm.toml --plugin plugin.py", "a logger's, in a plan", column_of(CSV)),
    ],
    "Components that are not installed": [
        call("the trainer ppo", lambda place: plugins.load().registry.get(TRAINER, "ppo")),
        call("a file for a loss", lambda place: plugins.load().registry.get(POLICY_LOSS, "losses:mine")),
        *(empty(TRAINER, name) for name in ("grpo", "ppo")),
    ],
    "Plugins in a file": [
        typed("check rm.toml --plugin nowhere.py"),
        plugin("an import that fails", "import not_there_at_all"),
        plugin("an exit", "raise SystemExit(3)"),
        plugin("an error while it registers", REGISTERS.format(name="half") + "    raise KeyError('gone')"),
        plugin("no @hookimpl", "def rlhf_register(registry): ..."),
        plugin("a hook that is misspelt", f"{HOOK}def rlhf_stpe_end(stage): ..."),
        plugin("an argument that is misspelt", f"{HOOK}def rlhf_step_end(stage, sept): ..."),
        plugin(
            "a kind by its name", f"{HOOK}def rlhf_register(registry): registry.add('reward', 'x', print)"
        ),
        plugin(
            "a text that names no component",
            f"from rlhf_core import REWARD\n{HOOK}def rlhf_register(registry): registry.add(REWARD, 'x', 'my_rewards')",
        ),
        plugin(
            "another kind of a known name",
            f"from rlhf_core import Kind\n{HOOK}def rlhf_register(registry): registry.add(Kind('reward'), 'x', print)",
        ),
        plugin("another name for the registry", f"{HOOK}def rlhf_register(r): ..."),
        plugin("nothing", "x = 1"),
        plugin(
            "two problems", f"from rlhf_core import hookimpl\ndef rlhf_one(): ...\n{HOOK}def rlhf_two(): ..."
        ),
        plugin("the name of a component that there is", REGISTERS.format(name="dapo")),
    ],
    "Callbacks": [
        callbacks("a class", [Decorated]),
        callbacks("an event that is misspelt", [Decorated(), Unknown()]),
        callbacks("events of TRL", [OfTrl()]),
        callbacks("an argument that there is not", [WrongArgument()]),
        callbacks("no list", Decorated()),
        callbacks("one twice", [TWICE, TWICE]),
    ],
    "Arguments of trainers": [
        grpo("model_name_or_path", model_name_or_path="x"),
        grpo("a field of the config", batch_size=1),
        grpo("a field of another library's config, without a counterpart", packing=True),
        grpo("another name of a field of the config", peft_config={}),
        grpo("modle", modle="x"),
        grpo("rewards by two names", reward_funcs=[len], rewards=[len]),
        call("data_collator", lambda place: SFTTrainer(data_collator=list)),
        call("model and model_init", lambda place: SFTTrainer(model="x", model_init=lambda: "x")),
        evaluated("a set of rows without a name", ""),
        evaluated("a set of rows whose name is a number", 1),
        evaluated("a set of rows whose name has two lines", "a\nb"),
    ],
}
