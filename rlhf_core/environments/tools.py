from __future__ import annotations

from dataclasses import dataclass

from transformers.utils import get_json_schema

from rlhf_core.contracts import Turn
from rlhf_core.plugins.component import load_function


@dataclass
class ToolEnvironment:
    tools: list[str]

    def __post_init__(self):
        self._f = {(fn := load_function(t)).__name__: fn for t in self.tools}
        self.tools = [get_json_schema(f) for f in self._f.values()]

    def reset(self, row, seed):
        p = row["prompt"]
        return [{"role": "user", "content": p}] if isinstance(p, str) else list(p)

    def step(self, completion):
        calls = completion.get("tool_calls")
        if not calls:
            return Turn(done=True, metrics={"calls": 0})
        out = []
        for c in calls:
            try:
                r = str(self._f[c["function"]["name"]](**c["function"]["arguments"]))
            except Exception as e:
                r = str(e)
            out.append({"role": "tool", "name": c["function"]["name"], "content": r})
        return Turn(out, metrics={"calls": len(calls)})
