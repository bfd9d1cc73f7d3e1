"""What loading costs while updates use it: large files, streams, worker processes, kills.

    python benchmarks/data/loading.py [file] [stream] [kills] [workers]

file: 200,000 pairs in JSONL, cold: seconds up to the first update of a trainer, milliseconds of the host per update in
the first and in the second epoch, and what is cached then. stream: 5 million made-up pairs of a generator: the same
first update, and memory over 1,000 updates. kills: that stream, killed at five random moments with 0, 1 and 2 workers:
the model's bytes against those of a run that was not killed. workers: milliseconds of the host per update of 8 pairs
of 256 + 256 tokens, with 0, 1 and 2 workers. Every run has a process of its own; the load is printed too.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from measure import MODEL, WORDS

FILE_ROWS, STREAM_ROWS = 200_000, 5_000_000
KILLS, KILL_UPDATES = 5, 400


def pairs(count: int, words: int = 70) -> Iterator[dict[str, Any]]:
    """Pairs of about 300 tokens."""
    for i in range(count):
        draw = random.Random(i)
        prompt, chosen, rejected = (" ".join(draw.choices(WORDS, k=words)) for _ in range(3))
        yield {"prompt": prompt, "chosen": f" {chosen} {i}", "rejected": f" {rejected} {i}"}


def made_up() -> Iterator[dict[str, Any]]:
    return pairs(STREAM_ROWS)


def short() -> Iterator[dict[str, Any]]:
    return pairs(STREAM_ROWS, words=8)


def unshared() -> Iterator[dict[str, Any]]:
    """Pairs of 256 + 256 tokens that share no start."""
    for i in range(STREAM_ROWS):
        draw = random.Random(i)
        chosen, rejected = (" ".join(draw.choices(WORDS, k=254)) for _ in range(2))
        yield {"chosen": f"a {chosen}", "rejected": f"the {rejected}"}


def make_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    made = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator((row["chosen"] for row in pairs(200)), made)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(directory)


def train(source: str, tokenizer: str, directory: str, options: str) -> None:
    """Train a tiny reward model on a file, or on a function of this module; print what the first update took."""
    begun = time.time()
    from rlhf_reward import RewardConfig, RewardTrainer

    class Seen:
        def __init__(self) -> None:
            self.first = self.cpu = 0.0
            self.memory: list[int] = []

        def rlhf_step_end(self, step: int) -> None:
            self.cpu = self.cpu or time.process_time()
            self.first = self.first or time.time() - begun
            if step % 100 == 0:
                self.memory.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096 // 10**6)

    seen = Seen()
    data: Any = source if Path(source).exists() else globals()[source]
    config = RewardConfig(
        save_directory=directory, progress_bar_type="json", log_steps=1, **json.loads(options)
    )
    model = {**MODEL, "tokenizer": tokenizer, "max_position_embeddings": 1024}
    RewardTrainer(config, model=model, train_dataset=data, callbacks=[seen]).train()
    print(json.dumps({"first": seen.first, "cpu": seen.cpu, "memory": seen.memory}))


def open_updates(source: Any, tokenizer: Any, workers: int, **options: Any) -> Any:
    """Make what a reward trainer draws updates from, without a model."""
    from rlhf_core import TrainerConfig, data
    from rlhf_core.data.preferences import usable_pairs
    from rlhf_core.data.source import open_files
    from rlhf_core.data.streams import open_source, open_streams
    from rlhf_core.fit.batches import ExampleUpdates, choose_row_layout
    from rlhf_core.mesh import make_mesh
    from rlhf_core.tokenizer import TextOptions

    encode = partial(data.encode_pairs, max_length=1024, chat_template=TextOptions())
    if isinstance(source, str):
        usable = partial(usable_pairs, options=TextOptions())
        loaded = data.load(source)
        rows = open_files(loaded, usable, encode, tokenizer, seed=0, shuffle=True, workers=workers)
    else:
        rows = open_source(open_streams(source), encode, tokenizer, seed=0, window=4096, workers=workers)
    config = TrainerConfig(**options)
    layout = choose_row_layout(rows.trees, config, make_mesh(), 512, reads_tokens=False)
    return ExampleUpdates(rows, config, layout, vocabulary=2000, sequence_names=("margin",), group=2)


def host(kind: str, source: str, tokenizer: str, workers: str) -> None:
    """Make updates as fast as they come; print milliseconds per update."""
    from transformers import AutoTokenizer

    opened = AutoTokenizer.from_pretrained(tokenizer)
    if kind == "file":
        updates = open_updates(source, opened, int(workers), num_train_epochs=2)
        half = updates.total // 2
        spans = [range(half), range(half, updates.total)]
    else:
        updates = open_updates(unshared, opened, int(workers), total_batch_size=8, max_training_steps=400)
        spans = [range(100), range(100, 400)]
    found = []
    for span in spans:
        begun = time.perf_counter()
        for step in span:
            updates.update(step)
        found.append(round(1000 * (time.perf_counter() - begun) / len(span), 2))
    print(json.dumps(found))
    from rlhf_core.workers import pool

    pool.close()


def start(*arguments: str, cache: Path) -> subprocess.Popen[str]:
    """Call a function of this module in a process."""
    command = [sys.executable, __file__, "--call", *arguments]
    environment = {**os.environ, "RLHF_CACHE": str(cache), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def child(*arguments: str, cache: Path) -> Any:
    """Return what a function of this module prints in a process."""
    process = start(*arguments, cache=cache)
    out, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{arguments} ended with {process.returncode}")
    return json.loads(out.splitlines()[-1])


def newest(directory: Path) -> int:
    """Return the updates of the newest checkpoint."""
    return max((int(p.name) for p in (directory / "checkpoints").glob("*") if p.name.isdigit()), default=0)


def time_file(scratch: Path, tokenizer: str) -> None:
    path = scratch / "pairs.jsonl"
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in pairs(FILE_ROWS))
    options = json.dumps({"max_training_steps": 20})
    for state in ("cold", "again"):
        found = child("train", str(path), tokenizer, str(scratch / state), options, cache=scratch / "first")
        print(
            f"file, {state}: first update after {found['first']:.1f} s of the process, {found['cpu']:.1f} s of CPU"
        )
    first, second = child("host", "file", str(path), tokenizer, "0", cache=scratch / "cache")
    entries = [entry.name[:5] for entry in (scratch / "cache" / "tokens").iterdir()]
    print(
        f"file: {first} ms of the host per update of 32 in the first epoch, {second} in the second; cache: {entries}"
    )


def time_stream(scratch: Path, tokenizer: str) -> None:
    options = json.dumps({"max_training_steps": 1000})
    found = child("train", "made_up", tokenizer, str(scratch / "stream"), options, cache=scratch / "cache")
    print(
        f"stream: first update after {found['first']:.1f} s, {found['cpu']:.1f} s of CPU; MB at updates 100, 200, …: "
        f"{found['memory']}"
    )


def time_kills(scratch: Path, tokenizer: str) -> None:
    draw = random.Random()
    hashes: dict[str, str] = {}
    base = {"max_training_steps": KILL_UPDATES, "save_steps": 7, "save_total_limit": 2}
    for name, kills in (("not killed", 0), ("0", KILLS), ("1", KILLS), ("2", KILLS)):
        options = json.dumps({**base, "dataloader_num_workers": int(name) if kills else 0})
        directory = scratch / f"kills {name}"
        arguments = ("train", "short", tokenizer, str(directory), options)
        killed: list[int] = []
        for least in sorted(draw.sample(range(KILL_UPDATES - 50), kills)):
            process = start(*arguments, cache=scratch / "cache")
            while process.poll() is None and newest(directory) < least:
                time.sleep(0.05)
            time.sleep(draw.uniform(0, 0.5))
            process.kill()
            process.communicate()
            killed.append(newest(directory))
        child(*arguments, cache=scratch / "cache")
        content = (directory / "artifacts/model/model.safetensors").read_bytes()
        hashes[name] = hashlib.sha256(content).hexdigest()[:12]
        print(f"kills, {name}: {hashes[name]}; killed after the checkpoints {killed}", flush=True)
    print("kills:", "the same bytes" if len(set(hashes.values())) == 1 else "DIFFERENT BYTES")


def time_workers(scratch: Path, tokenizer: str) -> None:
    for workers in "012":
        first, rest = child("host", "stream", "-", tokenizer, workers, cache=scratch / "cache")
        print(
            f"workers {workers}: {rest} ms of the host per update of 8 pairs of 512 tokens ({first} in the first 100)"
        )


CASES: dict[str, Callable[[Path, str], None]] = {
    "file": time_file,
    "stream": time_stream,
    "kills": time_kills,
    "workers": time_workers,
}


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        make_tokenizer(scratch / "tokenizer")
        for name in sys.argv[1:] or CASES:
            print(f"load {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores", flush=True)
            CASES[name](scratch, str(scratch / "tokenizer"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--call"]:
        {"train": train, "host": host}[sys.argv[2]](*sys.argv[3:])
    else:
        main()
