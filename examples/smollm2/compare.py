"""Compare a prepared SmolLM2-135M-Instruct with a reference: token ids, logits, greedy completion.

    python examples/smollm2/compare.py DIR

reference.npz holds a chat prompt of 37 tokens (`ids`), the logits of its last four positions, which were computed in
float64 on the same weights (`last_logits`), and the prompt with its greedy completion (`greedy`).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax
import numpy as np

from rlhf_core import SamplerInputs, load_model
from rlhf_core.sampling import Sampler, SamplingOptions

REFERENCE = Path(__file__).with_name("reference.npz")
PROMPT = "What is the capital of France?"
LARGEST_DIFFERENCE = 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare a prepared model with a reference.")
    parser.add_argument("directory", type=Path, metavar="DIR")
    model = load_model(parser.parse_args().directory)
    with np.load(REFERENCE) as file:
        ids, logits, greedy = (file[name] for name in ("ids", "last_logits", "greedy"))
    messages = [{"role": "user", "content": PROMPT}]
    encoded = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    same_ids = list(encoded["input_ids"]) == ids.tolist()
    computed = np.asarray(model.logits(ids[None], np.ones_like(ids)[None]))[0, -len(logits) :]
    difference = float(np.abs(computed - logits).max())
    sampler = Sampler(
        SamplerInputs(
            definition=model.definition,
            options=SamplingOptions(temperature=0.0, max_completion_length=32),
            mesh=model.mesh,
            stop_ids=model.stop_ids,
            num_generations=1,
            prompts_per_call=1,
            max_prompt_length=len(ids),
            tokenizer=model.tokenizer,
        )
    )
    rollouts = sampler(model.params, [ids], jax.random.key(0))
    completion = rollouts.tokens[0, : rollouts.lengths[0]].tolist()
    same_greedy = completion == greedy[len(ids) :].tolist()
    print(f"token ids of the prompt    {'equal' if same_ids else 'differ'}")
    print(
        f"logits                     largest difference {difference:.1e}, of at most {LARGEST_DIFFERENCE:.0e}"
    )
    print(
        f"greedy completion          {'equal' if same_greedy else 'differs'}: {model.tokenizer.decode(completion)}"
    )
    sys.exit(0 if same_ids and same_greedy and difference <= LARGEST_DIFFERENCE else 1)


if __name__ == "__main__":
    main()
