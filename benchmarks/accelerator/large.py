"""Compile a GRPO stage of a model of published size for eight devices, without having them; print a row per program.

    python benchmarks/accelerator/large.py qwen3.5-9b h100:8 --out qwen9b.json

An update has eight prompts of 1,024 tokens, each with eight completions of 240 in one row: 8 × 2,944 tokens. For
each program it prints the CPU seconds spent compiling, a device's peak memory, and, per call, the bytes the device
sends, its FLOPs, and the lower bound on its time with what sets it, as `rlhf check --on` counts them. It also lists
arrays that have two axes as long as a row, or that hold all experts' weights of a layer. Results are kept in
the file, so that the same command continues after an interruption. No weights are needed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
MODELS = {
    "qwen3.5-9b": (
        "fsdp = 8",
        'model_type = "qwen3_5_text", vocab_size = 248320, hidden_size = 4096, intermediate_size = 12288, '
        "num_attention_heads = 16, num_key_value_heads = 4, head_dim = 256, num_hidden_layers = 32, "
        "max_position_embeddings = 32768, tie_word_embeddings = false",
    ),
    "qwen3.5-35b-a3b": (
        "expert = 8",
        'model_type = "qwen3_5_moe_text", vocab_size = 248320, hidden_size = 2048, num_attention_heads = 16, '
        "num_key_value_heads = 2, head_dim = 256, moe_intermediate_size = 512, num_experts_per_tok = 8, "
        "shared_expert_intermediate_size = 512, num_experts = 256, num_hidden_layers = 40, "
        "max_position_embeddings = 32768, tie_word_embeddings = false",
    ),
    "gpt-oss-20b": (
        "expert = 8",
        'model_type = "gpt_oss", vocab_size = 201088, hidden_size = 2880, intermediate_size = 2880, '
        "num_attention_heads = 64, num_key_value_heads = 8, head_dim = 64, num_local_experts = 32, "
        "num_experts_per_tok = 4, num_hidden_layers = 24, max_position_embeddings = 131072, sliding_window = 128, "
        "tie_word_embeddings = false",
    ),
}
"""{name: (mesh, the sizes of its published config.json)}."""
PIPELINE = """
dir = "run"
mesh = {{ data = 1, {mesh} }}

[[stage]]
name = "policy"
trainer = "grpo"
model = {{ {sizes}, tokenizer = "tokenizer" }}
train_data = "prompts.jsonl"
max_prompt_length = 1024
rewards = ["length"]
num_generations = 8
total_batch_size = 64
remat = "full"
sampling = {{ max_completion_length = 240 }}
"""


def write_stage(place: Path, name: str) -> Path:
    """Write the pipeline, with prompts of 1,024 tokens and a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2, "word": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(place / "tokenizer")
    row = json.dumps({"prompt": " ".join(["word"] * 1024)}) + "\n"
    (place / "prompts.jsonl").write_text(row * 8)
    mesh, sizes = MODELS[name]
    file = place / "pipeline.toml"
    file.write_text(PIPELINE.format(mesh=mesh, sizes=sizes))
    return file


def compile_programs(given: argparse.Namespace) -> dict[str, Any]:
    """Compile the programs that are called, and return the verdict on the stage."""
    from rlhf_topologies.chips import parse
    from rlhf_topologies.compile import compile_stage, find_devices, planned_devices, program_facts
    from rlhf_topologies.programs import stage_programs
    from rlhf_topologies.verdicts import judge_stage

    from rlhf_core import plugins
    from rlhf_core.mesh import make_mesh
    from rlhf_core.pipeline.file import read
    from rlhf_core.pipeline.plan import plan
    from rlhf_core.runtime.files import write_atomic
    from rlhf_core.training import definition_of

    topology, file = parse(given.on), Path(given.out)
    kept: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}

    def compiled(program: Any) -> dict[str, Any]:
        if program.name not in kept:
            print(f"compiling {program.name}", flush=True)
            lowered, began = program.lower(), time.process_time()
            made = lowered.compile()
            seconds = time.process_time() - began
            found = {"seconds": seconds, "arrays": []}
            if program.work != "update":
                found["arrays"] = large_arrays(made.as_text(), config, row_length(program.name))
            facts = program_facts(made, topology, decodes=program.steps > 0)
            kept[program.name] = {"facts": facts, **found}
            write_atomic(file, json.dumps(kept))
        facts = kept[program.name]["facts"]
        return dict(facts)

    with planned_devices(topology), tempfile.TemporaryDirectory() as directory:
        host = plugins.load()
        pipeline = str(write_stage(Path(directory), given.model))
        planned = plan(read(pipeline, sets=given.set, dir=None), host)
        model = definition_of(planned.stages[0].written.model, "lm", None, host.registry)
        assert model is not None
        config: Any = model[0].config
        mesh = make_mesh(**planned.mesh, devices=find_devices(topology))
        described = stage_programs(planned, host, mesh)["policy"]
        assert described is not None
        called = [each for each in described.programs if each.calls]
        chosen = tuple(each for each in called if any(only in each.name for only in given.only or [""]))
        facts = compile_stage(replace(described, programs=chosen), compiled)
        verdict = judge_stage({**facts, "remat": "full"}, topology, mesh.shape)
    return {**verdict, "kept": kept}


def row_length(name: str) -> int:
    """Read the tokens of a row from a program's name, "accumulate 8 × 2944" or "generate …, 1024 + 240 tokens"."""
    return sum(map(int, re.findall(r"\d+", re.split("[×,]", name)[-1])))


def large_arrays(text: str, config: Any, length: int) -> list[str]:
    """List the shapes of a compiled program's arrays that have two axes as long as a row, or all experts' weights."""
    seen = set(re.findall(r"\w+\[[\d,]+\]", text))
    kernels = [(config.experts, config.hidden_size, n * config.intermediate_size) for n in (1, 2)]

    def large(sizes: list[int]) -> bool:
        whole = config.experts and any(Counter(each) <= Counter(sizes) for each in kernels)
        return sizes.count(length) > 1 or bool(whole)

    return sorted(
        each for each in seen if large([int(n) for n in re.findall(r"\d+", each.partition("[")[2])])
    )


def show(given: argparse.Namespace, verdict: dict[str, Any]) -> None:
    """Print a table of the programs."""
    print(
        "| program | CPU s | GB | GB sent | TFLOP | at least | bound by |\n|---|---:|---:|---:|---:|---:|---|"
    )
    for each in verdict["programs"]:
        parts = [(each["call"], 1), *([(each["step"], each["steps"])] if each["step"] else [])]
        sent, flops = (sum(times * part[what] for part, times in parts) for what in ("sent", "flops"))
        kept = verdict["kept"][each["name"]]
        print(
            f"| {each['name']} | {kept['seconds']:.0f} | {each['peak'] / 1e9:.1f} | {sent / 1e9:.3g} "
            f"| {flops / 1e12:,.3g} | {each['seconds']:.3g} s | {each['bound']} |"
        )
        if kept["arrays"]:
            print(f"  large arrays: {', '.join(kept['arrays'])}")
    held = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in verdict["resident"].items())
    print(f"{given.model} on {given.on}: always in memory {held}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("on", help="such as h100:8 or v5p:2x2x2")
    parser.add_argument("--out", required=True, help="JSON file of what was compiled")
    parser.add_argument("--only", nargs="+", help="programs whose names contain one of these; default: all")
    parser.add_argument(
        "--set", action="append", default=[], help="as of rlhf check; such as policy.lora.rank=16"
    )
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.out = os.path.abspath(given.out)
    if given.here:
        show(given, compile_programs(given))
    else:
        from predict import start_in_compiler

        sys.exit(start_in_compiler(__file__, given.on, sys.argv[1:]))


if __name__ == "__main__":
    main()
