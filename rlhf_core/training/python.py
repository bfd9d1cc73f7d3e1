"""The class under which a trainer is run from Python, such as `SFTTrainer`."""

from __future__ import annotations

from typing import Any, ClassVar

from rlhf_core.config import TrainerConfig
from rlhf_core.stage.alone import Result, run_alone, trainer_arguments


class PythonTrainer:
    """Train from Python: `Trainer(config, model=path_or_model, train_dataset=rows).train()`."""

    trainer: ClassVar[str]
    """The name that the trainer is registered under."""
    config_class: ClassVar[type[TrainerConfig]]

    def __init__(self, config: Any = None, **inputs: Any) -> None:
        """inputs: `model`, `train_dataset`, `eval_dataset`, `tokenizer`, `rewards` (callables, registered names, reward
        model directories), `callbacks`, `accept`; `args`, `arguments`, `processing_class` and `reward_funcs` too.

        Raises InputError for an unknown argument, TypeError for a config of another class.
        """
        self.config, self.inputs = trainer_arguments(self.config_class, config, inputs)

    def train(self) -> Result:
        """Train; return the artifact and the last metrics."""
        return run_alone(self.trainer, self.config, **self.inputs)


def python_trainer(trainer: str, config: type[TrainerConfig], module: str) -> type[PythonTrainer]:
    """Make the class that runs a registered trainer from Python, called FOOTrainer for FOOConfig.

    module: `__name__` of the caller, which must hold the class under this name for it to be pickled.
    """
    name = config.__name__.removesuffix("Config") + "Trainer"
    doc = f"Train from Python: `{name}(config, model=path_or_model, train_dataset=rows).train()`."
    body = {"__module__": module, "__doc__": doc, "trainer": trainer, "config_class": config}
    return type(name, (PythonTrainer,), body)
