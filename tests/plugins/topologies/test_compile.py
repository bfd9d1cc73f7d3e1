"""Programs from shapes alone: those that a run compiles, on devices that are there; and `rlhf check --on`."""

from __future__ import annotations

import json
import os
import stat
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import pytest
from rlhf_topologies import interpreters
from rlhf_topologies.compile import compile_pipeline, installed_kernels
from rlhf_topologies.programs import built_programs, stage_programs

from rlhf_core import create_state, plugins
from rlhf_core.mesh import make_mesh
from rlhf_core.metrics import Mean
from rlhf_core.models import load_model
from rlhf_core.objective import trained_logps, trained_weight
from rlhf_core.optimizers import make_optimizer
from rlhf_core.pipeline.forecast import each_stage
from rlhf_core.runtime import background, machine
from rlhf_core.training import Build, Context, device_bytes
from tests.shared import pipelines

CHAIN = """
dir = "run"
mesh = { data = 2, fsdp = 2, tensor = 2 }
[[stage]]
name = "base"
trainer = "sft"
model = "model"
train_data = "corpus.jsonl"
max_sequence_length = 32
[[stage]]
name = "rm"
trainer = "reward"
model = "base.model"
train_data = "pairs.jsonl"
max_sequence_length = 32
[[stage]]
name = "direct"
trainer = "dpo"
model = "base.model"
train_data = "pairs.jsonl"
max_sequence_length = 32
[[stage]]
name = "policy"
trainer = "grpo"
model = "base.model"
train_data = "prompts.jsonl"
max_prompt_length = 16
rewards = [{ name = "model", model = "rm.model" }]
num_generations = 2
total_batch_size = 8
sampling = { max_completion_length = 4, stop_strings = ["kite"] }
"""
SAMPLING = ["train", "update", "read", "sample", "sample"]
"""What programs do of a trainer that samples: the last two move the weights, and generate."""
WITHOUT_COMPILER = {platform: interpreters.variable(platform) for platform in interpreters.PACKAGES}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    directory = tmp_path / "cache"
    monkeypatch.setenv("RLHF_CACHE", str(directory))
    return directory


@pytest.mark.long
@pytest.mark.parametrize("name", ["rm", "base", "policy"])
def test_a_run_compiles_the_programs_that_were_described(
    name: str, place: Any, rlhf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: set[str] = set()
    compile_later = background.BackgroundCompiler.compile

    def record(self: Any, key: Any, lowered: Any) -> None:
        compiled.add(lowered.as_text())
        compile_later(self, key, lowered)

    monkeypatch.setattr(background.BackgroundCompiler, "compile", record)
    described = stage_programs(*pipelines.planned(f"{name}.toml", dir=None), make_mesh())[name]
    assert described is not None
    programs = [program for program in described.programs if program.calls]
    kinds = {"base": ["train", "update"], "rm": ["train", "update"]}
    assert [program.work for program in programs] == kinds.get(name, SAMPLING)
    ended = rlhf("run", f"{name}.toml")
    assert ended.code == 0, ended.message
    assert [program.name for program in programs if program.lower().as_text() not in compiled] == []


def job(on: str, pipeline: str = "base.toml") -> dict[str, Any]:
    """Return what the other environment is given."""
    return {"on": on, "pipeline": pipeline, "sets": [], "dir": None, "plugins": []}


def test_a_state_of_shapes_is_that_of_arrays(place: Any) -> None:
    checked, host = pipelines.planned("base.toml", dir=None)
    mesh = make_mesh(2, 2, 2)

    def states(planned: Any, context: Any) -> Any:
        tx, _ = make_optimizer(planned.config, host.registry, 2)
        model = context.model("lm")
        return create_state(model, tx), create_state(load_model(place.path / "model", "lm", mesh=mesh), tx)

    shapes, arrays = each_stage(checked, host, states, mesh=mesh)["base"]
    described = jax.tree.map(
        lambda x: (x.shape, x.dtype, x.sharding), (shapes.params, shapes.opt_state, shapes.step)
    )
    assert described == jax.tree.map(
        lambda x: (x.shape, x.dtype, x.sharding), (arrays.params, arrays.opt_state, arrays.step)
    )
    held = sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(arrays.params)
        for shard in leaf.addressable_shards
        if shard.device == jax.devices()[0]
    )
    assert device_bytes(shapes.params) == held


def assert_counted_once(stage: Any) -> None:
    """Arguments and what lies beside them are the stage's residents and what the program alone is given."""
    held = stage["resident"]
    total = sum(held.values())
    own = {
        program["name"].split()[0]: program["memory"]["arguments"] + program["memory"]["beside"] - total
        for program in stage["programs"]
    }
    assert own["move"] == 0
    assert own["apply"] == pytest.approx(held["parameters"], abs=1000)  # gradients, and the metrics
    for name in ("accumulate", "read"):  # rows, and for accumulate no sums yet
        assert 0 < own[name] < held.get("frozen parameters", held["parameters"]) / 2


def test_every_program_of_every_stage(place: Any, cache: Path) -> None:
    """On eight devices of this machine in place of GPUs: bfloat16 and 256 slots all the same; without any weights."""
    place.write("chain.toml", f"{CHAIN}num_iterations = 2\n")  # two policies read every rollout
    for file in (place.path / "model").glob("*.safetensors"):
        file.unlink()
    asked = job("h100:8", "chain.toml")
    said: list[str] = []
    results = compile_pipeline(asked, devices=jax.devices(), say=said.append)
    assert machine.planned() is None
    assert results["mesh"] == {"data": 2, "fsdp": 2, "tensor": 2}
    assert list(results["stages"]) == ["base", "rm", "direct", "policy"]
    policy = {program["name"].split()[0]: program for program in results["stages"]["policy"]["programs"]}
    assert list(policy) == ["accumulate", "apply", "read", "move", "generate", "score"]
    assert set(results["stages"]["policy"]["resident"]) == {
        "parameters", "optimizer", "reference", "reward model",
    }  # fmt: skip
    held = results["stages"]["policy"]["resident"]
    assert policy["move"]["memory"]["beside"] == sum(held.values()) - held["parameters"]
    assert policy["generate"]["memory"]["beside"] == sum(held.values())
    assert policy["read"]["memory"]["beside"] == sum(held.values()) - held["reference"] - held["parameters"]
    assert policy["score"]["memory"]["beside"] == sum(held.values()) - held["reward model"]
    assert policy["apply"]["memory"]["beside"] == held["reference"] + held["reward model"]
    assert policy["generate"]["steps"] == 4
    assert policy["generate"]["tokens"] == 8 * 4
    assert (policy["read"]["calls"], policy["accumulate"]["calls"]) == (1 / 2, 1)
    assert policy["accumulate"]["call"]["products"].get("bf16", 0) > 0
    assert policy["apply"]["memory"]["outputs"] < 1000  # the new state is in place of the old one
    assert policy["generate"]["step"]["products"]
    assert_counted_once(results["stages"]["policy"])
    direct = [program["name"].split()[0] for program in results["stages"]["direct"]["programs"]]
    assert direct == ["accumulate", "apply"]
    programs = sum(len(stage["programs"]) for stage in results["stages"].values())
    assert len(said) == len(list((cache / "compiled").glob("*.json"))) <= programs
    assert "compiling policy: apply" in said
    again: list[str] = []
    second = compile_pipeline(asked, devices=jax.devices(), say=again.append)
    assert again == []
    assert second == results


@pytest.mark.long  # `test_every_program_of_every_stage` has a policy, too, without adapters
def test_what_lies_beside_a_program_with_adapters_is_counted_once(place: Any) -> None:
    """Two policies read every rollout; they share the frozen parameters, which are given twice."""
    place.settings("policy.toml", "num_iterations = 2\nlora = { rank = 2 }")
    stage = compile_pipeline(job("h100:8", "policy.toml"), devices=jax.devices(), say=lambda _: None)[
        "stages"
    ]["policy"]
    assert "frozen parameters" in stage["resident"]
    assert_counted_once(stage)


def test_what_waits_in_the_hosts_memory_is_not_in_a_devices(place: Any) -> None:
    """It is brought: the optimizer's state with every update, the reference with every second, a rollout's."""
    place.settings("policy.toml", 'num_iterations = 2\noffload = ["optimizer", "reference"]')
    found = stage_programs(*pipelines.planned("policy.toml", dir=None), make_mesh())["policy"]
    assert found is not None
    assert set(found.resident) == {"parameters"}
    parameters = device_bytes(found.resident["parameters"])
    brought = dict.fromkeys(("train", "read", "update", "sample"), 0.0)
    for program in found.programs:
        brought[program.work] += program.calls * program.host
    assert brought["train"] == brought["sample"] == 0
    assert brought["read"] == pytest.approx(parameters / 2)
    assert brought["update"] == pytest.approx(2 * parameters, rel=0.01)  # Adam's two moments, and its count


def test_a_model_of_shapes_has_the_adapters_that_are_asked_for(place: Any) -> None:
    place.settings("base.toml", 'lora = { rank = 3, targets = ["q_proj"] }')
    models = each_stage(
        *pipelines.planned("base.toml", dir=None),
        lambda _, context: context.model("lm"),
        mesh=make_mesh(),
    )
    assert models["base"] is not None
    leaves = jax.tree_util.tree_leaves_with_path(models["base"].params)
    shapes = {jax.tree_util.keystr(path, simple=True, separator="."): x.shape for path, x in leaves}
    assert {name: shape for name, shape in shapes.items() if "lora" in name} == {
        "layers.self_attn.q_proj.adapter.lora_a": (1, 16, 3),
        "layers.self_attn.q_proj.adapter.lora_b": (1, 3, 16),
    }
    assert shapes["layers.self_attn.q_proj.kernel"] == (1, 16, 16)


def test_sampling_takes_what_the_chip_has(place: Any) -> None:
    """With less memory, as many completions in more calls; the weights are brought once per rollout all the same."""
    place.settings("policy.toml", "total_batch_size = 32")
    described = []
    for memory in (10**9, 10**5):
        with machine.planning_for(machine.Planned("gpu", 2, memory)):
            found = stage_programs(
                *pipelines.planned("policy.toml", dir=None), make_mesh(devices=jax.devices()[:2])
            )["policy"]
        assert found is not None
        described.append([program for program in found.programs if program.work == "sample"])
    (move, once), (again, often) = described
    assert move.calls == again.calls == once.calls < often.calls
    assert once.calls * once.tokens == often.calls * often.tokens


def test_several_losses_are_counted_by_a_program_of_their_own(place: Any) -> None:
    checked, host = pipelines.planned("base.toml", dir=None)

    def losses(model: Any) -> Any:
        def compute(params: Any, batch: Any) -> Any:
            logps, _ = trained_logps(model, params, batch)
            return {name: Mean.of(-logps, trained_weight(batch)) for name in ("first", "second")}, {}

        return compute

    def build(config: Any, context: Context) -> Build:
        model = context.model("lm")
        model, updates = context.updates(model, context.texts("train_data"), reads_tokens=True)
        return Build(model, updates, losses(model.definition))

    def describe(_: Any, context: Any) -> Any:
        return built_programs(build, context)

    programs = each_stage(checked, host, describe, mesh=make_mesh())["base"].programs
    assert [program.name.split()[0] for program in programs] == ["accumulate", "count", "apply"]
    accumulate, count, _ = programs
    assert count.calls == accumulate.calls
    assert (count.work, count.tokens, count.reads) == ("update", 0, ())
    texts = [program.lower().as_text() for program in programs]
    assert "dot_general" in texts[0]
    assert "dot_general" not in texts[1]


def test_a_reward_model_that_is_not_here_is_named(place: Any) -> None:
    place.settings("policy.toml", 'rewards = [{ name = "model", model = "someone/reward-model" }]')
    described = stage_programs(*pipelines.planned("policy.toml", dir=None), make_mesh())["policy"]
    assert described is not None
    assert described.note == "reward model is not compiled: its model is not on this machine yet"
    assert [program.work for program in described.programs] == SAMPLING
    accumulate, _, reading, *_ = described.programs
    assert reading.reads == ("reference", "frozen parameters")
    assert reading.calls == accumulate.calls == 1


def test_products_of_a_step_by_hand(place: Any) -> None:
    """Six per weight and trained token at the head, and for every token in the layers; the backward pass takes the
    larger part. Attention is small beside it, here.
    """
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    table = ", ".join(f"{key} = {value}" for key, value in wide.items())
    place.settings(
        "base.toml", f'model = {{ model_type = "llama", {table}, tokenizer = "model" }}\nremat = "none"'
    )
    results = compile_pipeline(job("h100:1"), devices=jax.devices()[:1], say=lambda _: None)
    stage = results["stages"]["base"]
    accumulate = stage["programs"][0]
    rows, time = map(int, accumulate["name"].split()[1::2])
    layers, head = 2 * (4 * 256 * 256 + 3 * 256 * 512), 256 * 32
    least = 6 * layers * rows * time
    assert least < accumulate["call"]["flops"] < 1.5 * (least + 6 * head * rows * time)


def test_kernels_are_those_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert installed_kernels() == f"rlhf-kernels {version('rlhf-kernels')}"
    monkeypatch.setenv(plugins.DISABLE, "rlhf-kernels")
    assert installed_kernels() is None


def test_without_a_compiler_the_commands_that_install_it(
    place: Any, rlhf: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those for GPUs are on the page: tests/docs/test_docs_many_devices.py."""
    monkeypatch.delenv("RLHF_TPU_PYTHON", raising=False)
    ended = rlhf("check", "base.toml", "--on", "v5e:2x4")
    assert ended.code == 2
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    directory = cache / "compilers" / "tpu"
    assert f"{python} -m venv {directory}" in ended.message
    assert f"{directory}/bin/python -m pip install 'jax[tpu]=={jax.__version__}'" in ended.message
    assert "or set RLHF_TPU_PYTHON" in ended.message


def fake_python(directory: Path, answer: str, *, error: str = "", code: int = 0) -> Path:
    """An interpreter that gives one answer."""
    file = directory / "python"
    file.write_text(f"#!/bin/sh\necho '{answer}'\necho \"{error}\" >&2\nexit {code}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (json.dumps([[3, 9], jax.__version__, True]), "is Python 3.9, and this is"),
        (json.dumps([list(sys.version_info[:2]), "0.1.0", True]), "has jax 0.1.0, not"),
        (json.dumps([list(sys.version_info[:2]), None, True]), "has no jax, not"),
        (json.dumps([list(sys.version_info[:2]), jax.__version__, False]), "has no jax_cuda13_plugin"),
        ("nothing", "is not a Python that runs"),
    ],
)
def test_an_environment_that_does_not_fit(
    answer: str, words: str, place: Any, rlhf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_GPU_PYTHON", str(fake_python(tmp_path, answer)))
    ended = rlhf("check", "base.toml", "--on", "h100:8")
    assert ended.code == 2
    assert f"RLHF_GPU_PYTHON={tmp_path / 'python'} {words}" in ended.message
    assert "pip install" in ended.message


def test_what_the_other_environment_finds_wrong_is_said(place: Any) -> None:
    """Its packages are this one's, after its own; a pipeline's problems come back."""
    with pytest.raises(interpreters.InputError, match="--on h100:8: the compiler does not know"):
        interpreters.run(Path(sys.executable), job("h100:8"))


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.long)])
def test_why_the_other_environment_ended_is_said(real: bool, tmp_path: Path) -> None:
    """By Python itself, given no job, and by a program that ends as it does then: Python imports JAX for seconds."""
    python = (
        Path(sys.executable) if real else fake_python(tmp_path, "nothing", error="KeyError: 'on'", code=1)
    )
    with pytest.raises(interpreters.RunError, match=r"ended with code 1:\n(.|\n)*KeyError"):
        interpreters.run(python, {})


def compiler(platform: str) -> None:
    """Skip without the compiler of a platform."""
    if not os.environ.get(WITHOUT_COMPILER[platform]):
        pytest.skip(
            "set RLHF_GPU_PYTHON and RLHF_TPU_PYTHON, or run make test-accelerators, which installs them"
        )


@pytest.mark.accelerators
@pytest.mark.parametrize(("platform", "on"), [("gpu", "h100:8"), ("gpu", "a100:2x4"), ("tpu", "v5e:2x4")])
def test_the_real_compilers(platform: str, on: str, place: Any, rlhf: Any) -> None:
    compiler(platform)
    place.write("chain.toml", CHAIN)
    ended = rlhf("check", "chain.toml", "--on", on, "--json")
    assert ended.code == 0, ended.message
    found = json.loads(ended.out)
    assert found["devices"] == 8
    stages = found["stages"]
    assert list(stages) == ["base", "rm", "direct", "policy"]
    for stage in stages.values():
        assert stage["fits"]
        assert stage["update_seconds"] > 0
        for program in stage["programs"]:
            assert program["error"] is None
            assert 0 < program["peak"] < found["chip"]["usable"]
    generate = stages["policy"]["programs"][4]
    assert generate["step"]["flops"] > 0
    assert generate["steps"] == 4
    shown = rlhf("check", "chain.toml", "--on", on)
    assert "compiling" not in shown.message  # it was kept
    assert "sampling: at most" in shown.out
    assert "fits: at most" in shown.out


@pytest.mark.accelerators
@pytest.mark.parametrize(
    ("platform", "on", "data"), [("gpu", "h100:2x4", 2), ("tpu", "v5e:2x4", 8)], ids=["gpu", "tpu"]
)
def test_gradients_are_summed_once_and_in_float32(
    platform: str, on: str, data: int, place: Any, rlhf: Any
) -> None:
    """On GPUs each machine gathers weights in bfloat16, twice, and scatters gradients in float32; a sum over machines,
    and of all TPUs here, is left to the update. Losses per token, which `rows/` keeps, are gathered on every device.
    """
    compiler(platform)
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 10, "num_attention_heads": 4}
    table = ", ".join(f"{key} = {value}" for key, value in sizes.items())
    model = f'model = {{ model_type = "llama", {table}, tokenizer = "model" }}\nremat = "full"'
    place.settings("base.toml", f"{model}\ntotal_batch_size = 64")
    mesh = ["--set", f"mesh.data={data}", "--set", f"mesh.fsdp={8 // data}"]
    ended = rlhf("check", "base.toml", "--on", on, *mesh, "--json")
    assert ended.code == 0, ended.message
    accumulate, *_, apply = (p["call"] for p in json.loads(ended.out)["stages"]["base"]["programs"])
    matrices = 10 * (
        4 * 512 * 512 + 3 * 512 * 1024
    )  # of the layers; embedding and head are small beside them
    losses = 4 * 8 * 32  # of 8 rows of 32 tokens
    if platform == "gpu":
        assert accumulate["network"] == losses / 8
        sent = accumulate["collectives"]
        assert sent["all-gather"][1] == pytest.approx(2 * 2 * matrices, rel=0.1)
        assert sent["reduce-scatter"][1] == pytest.approx(4 * matrices, rel=0.1)
        assert apply["network"] == pytest.approx(4 * matrices / 4, rel=0.1)
    else:
        assert accumulate["network"] == 0
        assert accumulate["collectives"] == {"all-gather": [1.0, losses]}
        assert apply["collectives"]["all-reduce"][1] == pytest.approx(4 * matrices, rel=0.1)


@pytest.mark.accelerators
def test_every_gpu_of_the_table_compiles(place: Any, rlhf: Any) -> None:
    compiler("gpu")
    known = rlhf("check", "base.toml", "--on", "x1:1").message.partition("there are ")[2].partition(".")[0]
    for chip in [name for name in known.split(", ") if not name.startswith("v")]:
        ended = rlhf("check", "base.toml", "--on", f"{chip}:1")
        assert ended.code == 0, ended.message


@pytest.mark.accelerators
def test_what_does_not_fit_ends_with_what_to_change(place: Any, rlhf: Any) -> None:
    """A state of 13 billion float32 parameters with two moments each does not fit a device of 80 GB."""
    compiler("gpu")
    sizes = {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 16,
        "num_attention_heads": 64,
    }
    table = ", ".join(f"{key} = {value}" for key, value in sizes.items())
    place.settings("base.toml", f'model = {{ model_type = "llama", {table}, tokenizer = "model" }}')
    ended = rlhf("check", "base.toml", "--on", "h100:2", "--set", "mesh.data=2")
    assert ended.code == 2
    assert "stage 'base' does not fit h100:2" in ended.message
    assert "set mesh = { fsdp = 2 }" in ended.message
