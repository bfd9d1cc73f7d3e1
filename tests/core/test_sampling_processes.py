"""Two processes, one mesh: each must hold every rollout, the same as one process gets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PROGRAM = """
import sys
import jax
process, count, port, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
jax.config.update("jax_num_cpu_devices", 4 // count)
if count > 1:
    jax.distributed.initialize(f"localhost:{port}", num_processes=count, process_id=process)
import numpy as np
from rlhf_core.mesh import make_mesh
from rlhf_core.models import DECODER, Definition
from rlhf_core.sampling import Sampler, SamplingOptions

sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=40)
config = DECODER.parse({"model_type": "llama", "initializer_range": 0.5, **sizes}, "lm")
definition = Definition(DECODER, config, "lm")
mesh = make_mesh(data=2, fsdp=2)
params = jax.jit(definition.init, out_shardings=definition.shardings(mesh))(jax.random.key(1))
options = SamplingOptions(max_completion_length=8)
sampler = Sampler(
    definition, options, mesh=mesh, stop_ids=(3,), num_generations=2, prompts_per_call=4, max_prompt_length=32
)
prompts = [np.arange(1 + i, dtype=np.int32) for i in range(6)]
np.savez(out, **sampler(params, prompts, jax.random.key(0))._asdict())
"""


@pytest.mark.slow
def test_every_process_gets_every_rollout(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    outs, running = [], []
    for process, count in ((0, 1), (0, 2), (1, 2)):
        outs.append(tmp_path / f"{process}_of_{count}.npz")
        command = [sys.executable, "-c", PROGRAM, str(process), str(count), port, str(outs[-1])]
        running.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    try:
        for process in running:
            text, _ = process.communicate(timeout=300)
            assert process.returncode == 0, text
    finally:
        for process in running:
            process.kill()
    alone, first, second = (np.load(path) for path in outs)
    for name in ("tokens", "lengths", "finished", "logps"):
        np.testing.assert_array_equal(first[name], second[name])
    np.testing.assert_array_equal(first["tokens"], alone["tokens"])
    np.testing.assert_allclose(first["logps"], alone["logps"], atol=1e-5)
