"""A directory with everything that its pipelines name, for tests that break some of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_tools.demo.generate import write_tokenizer

from rlhf_core.models import fresh_model
from rlhf_core.tokenizer import load_tokenizer

ASK, REPLY = "Mia wants a red kite .", " Dear Mia , here is your red kite . Thank you !"
FILES = {
    "corpus.jsonl": {"prompt": ASK, "completion": REPLY},
    "pairs.jsonl": {"prompt": ASK, "chosen": REPLY, "rejected": " Not my problem ."},
    "prompts.jsonl": {"prompt": ASK, "size": 3},
}
REWARDS = "def brevity(completions, size):\n    return [-float(len(text)) for text in completions]\n"
MODEL = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}
STAGES = {
    "base": 'trainer = "sft"\nmodel = "model"\ntrain_data = "corpus.jsonl"\nmax_sequence_length = 32\n',
    "rm": 'trainer = "reward"\nmodel = "model"\ntrain_data = "pairs.jsonl"\nmax_sequence_length = 32\n',
    "policy": 'trainer = "grpo"\nmodel = "model"\ntrain_data = "prompts.jsonl"\nmax_prompt_length = 16\n'
    'rewards = ["rewards.py:brevity"]\nnum_generations = 2\nsampling = { max_completion_length = 4 }\n',
    "dpo": 'trainer = "dpo"\nmodel = "model"\ntrain_data = "pairs.jsonl"\nmax_sequence_length = 32\n',
    "online": 'trainer = "online_dpo"\nmodel = "model"\ntrain_data = "prompts.jsonl"\nmax_prompt_length = 16\n'
    'rewards = ["rewards.py:brevity"]\nsampling = { max_completion_length = 4 }\n',
    "distill": 'trainer = "distill"\nmodel = "model"\nteacher_model = "model"\ntrain_data = "prompts.jsonl"\n'
    "max_prompt_length = 16\nsampling = { max_completion_length = 4 }\n",
}


def good_files(repository: Path, directory: Path) -> dict[str, bytes]:
    """{name: content} of all that the pipelines name: data, pipelines, rewards.py, a language model in model/, a reward
    model in scorer/, and in small/ a language model that has fewer embeddings than its tokenizer has tokens.
    """
    write_tokenizer(directory / "words")
    tokenizer = load_tokenizer(directory / "words")
    fresh_model(MODEL, "lm", tokenizer=tokenizer).save(directory / "model")
    fresh_model(MODEL, "score", tokenizer=tokenizer).save(directory / "scorer")
    fresh_model({**MODEL, "vocab_size": 16}, "lm").save(directory / "small")
    shutil.copytree(directory / "words", directory / "small", dirs_exist_ok=True)
    files = {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}
    for name, row in FILES.items():
        files[name] = (json.dumps(row) + "\n").encode() * 4
    for stage, text in STAGES.items():
        head = f'dir = "run"\n[[stage]]\nname = "{stage}"\nmax_training_steps = 2\ntotal_batch_size = 4\n'
        files[f"{stage}.toml"] = (head + text).encode()
    return {**files, "rewards.py": REWARDS.encode()}


class Place(NamedTuple):
    """A directory with everything that the pipelines name."""

    path: Path
    good: dict[str, bytes]

    def restore(self, *, anew: bool = False) -> None:
        """Everything as it was; anew: and nothing else, so that a run directory is gone."""
        for path in self.path.iterdir() if anew else [self.path / name for name in ("model", *self.good)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        for name, content in self.good.items():
            (self.path / name).parent.mkdir(exist_ok=True)
            (self.path / name).write_bytes(content)

    def write(self, name: str, content: str | bytes) -> None:
        (self.path / name).write_bytes(content.encode() if isinstance(content, str) else content)

    def rows(self, name: str, *rows: Any) -> None:
        """The good first row, then `rows`."""
        self.write(name, "".join(json.dumps(row) + "\n" for row in (FILES[name], *rows)))

    def row(self, name: str, **cells: Any) -> None:
        """A second row that differs from the good one in `cells`."""
        self.rows(name, {**FILES[name], **cells})

    def settings(self, pipeline: str, lines: str) -> None:
        """`lines` of TOML in place of those that set the same fields of the stage."""
        replaced = [line.partition(" = ")[0] for line in lines.splitlines()]
        kept = [
            line
            for line in self.good[pipeline].decode().splitlines()
            if line.partition(" = ")[0] not in replaced
        ]
        self.write(pipeline, "\n".join([*kept, lines, ""]))
