"""Two processes, one mesh: each must hold every rollout, the same as one process gets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.shared import processes

PROGRAM = """
import numpy as np
from rlhf_core.mesh import make_mesh
from rlhf_core.models import DECODER
from rlhf_core import SamplerInputs
from rlhf_core.sampling import ConversationSampler, Sampler, SamplingOptions

sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=40)
definition = DECODER.define({"model_type": "llama", "initializer_range": 0.5, **sizes}, "lm")
mesh = make_mesh(data=2, fsdp=2)
params = jax.jit(definition.init, out_shardings=definition.shardings(mesh))(jax.random.key(1))
options = SamplingOptions(max_completion_length=8)
sampler = Sampler(
    SamplerInputs(
        definition, options, mesh=mesh, stop_ids=(3,), num_generations=2, prompts_per_call=4, max_prompt_length=32
    )
)
prompts = [np.arange(1 + i, dtype=np.int32) for i in range(6)]
np.savez(arguments[0], **sampler(params, prompts, jax.random.key(0))._asdict())
"""


@pytest.mark.long
def test_every_process_gets_every_rollout(tmp_path: Path) -> None:
    processes.alone_and_in_two(PROGRAM, lambda i, n: [tmp_path / f"{i}_of_{n}.npz"])
    alone, first, second = (np.load(tmp_path / f"{name}.npz") for name in ("0_of_1", "0_of_2", "1_of_2"))
    for name in ("tokens", "lengths", "finished", "logps"):
        np.testing.assert_array_equal(first[name], second[name])
    np.testing.assert_array_equal(first["tokens"], alone["tokens"])
    np.testing.assert_allclose(first["logps"], alone["logps"], atol=1e-5)


CONVERSATIONS = (
    PROGRAM[: PROGRAM.index("options = ")]
    + """
from pathlib import Path
from rlhf_core.plugins.component import load_file
worlds = load_file(Path(arguments[1]))
inputs = SamplerInputs(
    definition,
    SamplingOptions(max_completion_length=8),
    mesh=mesh,
    stop_ids=(3,),
    num_generations=2,
    prompts_per_call=3,
    max_prompt_length=8,
    conversation_length=80,
)
sampler = ConversationSampler(inputs)
world = worlds.MadeUp(40, seed=1)
prompts = [np.arange(1 + i // 2, dtype=np.int32) for i in range(10)]
sampler.converse(params, prompts, jax.random.key(0), None, world)
turns = {f"{i}.{k}.{name}": getattr(turn, name) for i, said in world.said.items() for k, turn in enumerate(said)
         for name in ("tokens", "logps")}
np.savez(arguments[0], **turns)
"""
)


@pytest.mark.long
def test_every_process_holds_every_conversation(tmp_path: Path) -> None:
    """Ten conversations in six slots of two processes."""
    worlds = Path(__file__).parents[2] / "shared" / "worlds.py"
    processes.alone_and_in_two(CONVERSATIONS, lambda i, n: [tmp_path / f"{i}_of_{n}.npz", worlds])
    alone, first, second = (np.load(tmp_path / f"{name}.npz") for name in ("0_of_1", "0_of_2", "1_of_2"))
    assert set(alone) == set(first) == set(second)
    assert len(alone) > 40
    for name in alone:
        np.testing.assert_array_equal(first[name], second[name])
        np.testing.assert_allclose(first[name], alone[name], atol=1e-5 if name.endswith("logps") else 0)
