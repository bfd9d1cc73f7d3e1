"""Time rollouts whose completions end at different lengths: in a few slots, or all together.

python benchmarks/speed/mixed_lengths.py [--model 10m] [--rounds 5]

Eight prompts of 64 tokens × 8 completions of at most 192, of random weights: a token in 64 stops one, as
`stop_token_ids`, or none does. All ways sample the same completions, in turn, in one process.
"""

from __future__ import annotations

import argparse
import json
import time

import jax
import numpy as np
import works
from ours_steps import fresh

from rlhf_core import SamplerInputs, runtime, sampling
from rlhf_core.sampling import placement

PROMPTS, GROUP = 8, 8
STOPS_IN = 64
NEVER = 10**9


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=works.MODELS, default="10m")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    runtime.prepare()
    shape = works.MODELS[given.model]
    model = fresh(shape, "lm")
    prompts = list(works.token_ids(PROMPTS, works.PROMPT, shape.vocab))
    usual = placement.SLOTS["cpu"], sampling.sampler.LAST_SLOTS
    everyone = PROMPTS * GROUP
    ways = {
        "all together": (everyone, NEVER),
        **{f"{n} slots": (n, NEVER) for n in (8, 16, 32)},
        f"{usual[0]} slots, {usual[0] // 4} for the last (the default)": usual,
    }
    found = []
    for stops in (shape.vocab // STOPS_IN, 0):
        inputs = SamplerInputs(
            definition=model.definition,
            options=sampling.SamplingOptions(max_completion_length=works.COMPLETION),
            mesh=model.mesh,
            stop_ids=range(stops),
            num_generations=GROUP,
            prompts_per_call=PROMPTS,
            max_prompt_length=works.PROMPT,
        )
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        tokens = 0
        for turn in range(1 + given.rounds):  # the first compiles
            for name, (placement.SLOTS["cpu"], sampling.sampler.LAST_SLOTS) in ways.items():
                sampler = sampling.Sampler(inputs)
                began = time.perf_counter()
                samples = sampler(model.params, prompts, jax.random.key(works.SEED))
                seconds[name] += [time.perf_counter() - began] if turn else []
                tokens = int(samples.lengths.sum())
        print(f"\n{tokens / everyone:.0f} of {works.COMPLETION} tokens on average")
        for name, each in seconds.items():
            ratio = np.median([a / b for a, b in zip(seconds["all together"], each, strict=True)])
            print(f"  {np.median(each):7.3f} s  {ratio:5.2f} x  {name}")
            found.append({"mean": tokens / everyone, "way": name, "seconds": each, "ratio": ratio})
    print(json.dumps({"model": given.model, "runs": found}))


if __name__ == "__main__":
    main()
