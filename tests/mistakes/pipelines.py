"""Pipeline files that are wrong as files, with stages that do not go together, and `--set` that sets nothing."""

from __future__ import annotations

from tests.mistakes.mistake import Mistake, file, typed

MANY = """
sead = 1
mesh = { data = -1, fsdp = -1, tenser = 2 }
[[stage]]
name = "base"
trainer = "sft"
model = { model_type = "llama", tokenizer = "wordz/" }
train_data = "corpas.jsonl"
learning_rat = 1e-3
log_steps = "big"
[[stage]]
name = "rm"
trainer = "rewrad"
model = "bass.model"
[[stage]]
name = "policy"
trainer = "grpo"
model = "rn.model"
loss = { name = "dpao" }
rewards = [{ name = "model", model = "base.modle" }, { name = "mine.py:brevity" }]
[[stage]]
name = "last"
trainer = "sft"
model = "later.model"
optimizer = { name = "adamw", bb = 2.0 }
[[stage]]
name = "later"
trainer = "sft"
"""
CHAIN = """
[[stage]]
name = "rm"
trainer = "reward"
model = "model"
train_data = "pairs.jsonl"
[[stage]]
name = "base"
trainer = "sft"
model = "rm.model"
train_data = "corpus.jsonl"
[[stage]]
name = "policy"
trainer = "grpo"
model = "model"
train_data = "prompts.jsonl"
rewards = [{ name = "model", model = "base.model" }]
[[stage]]
name = "rm2"
trainer = "reward"
model = "rm.model"
train_data = "pairs.jsonl"
"""
ONE = "[[stage]]\nname = 'a'\ntrainer = 'sft'\nmodel = 'model'\ntrain_data = 'corpus.jsonl'\n"
FRESH = """
[[stage]]
name = "base"
trainer = "sft"
train_data = "corpus.jsonl"
model = { model_type = "llama", hidden_size = 16, num_hidden_layer = 2, tokenizer = "words" }
[[stage]]
name = "more"
trainer = "sft"
train_data = "corpus.jsonl"
model = "base.model"
"""


def pipeline(name: str, content: str | bytes, more: str = "") -> Mistake:
    return file(name, "p.toml", content, f"check p.toml --dir run{more}")


def manifest(name: str, content: str) -> Mistake:
    """A manifest in the directory of the model that sft starts from."""
    return file(name, "model/rlhf_artifact.json", content, "check base.toml")


def not_set(assignment: str) -> Mistake:
    return typed(f"check policy.toml --set '{assignment}'")


DEEP = ".".join(["a"] * 50_000)
SECTIONS = {
    "Pipeline files that are not TOML": [
        pipeline("no value", b"seed = \n"),
        pipeline("a key twice", b"a = 1\na = 2\n"),
        pipeline("a table twice", b"[stage]\n[stage]\n"),
        pipeline("no value, after a byte order mark", b"\xef\xbb\xbfseed = \n"),
        pipeline("not UTF-8", b"name = '\xff'\n"),
        pipeline("a number of 5,000 digits", f"seed = {'1' * 5000}"),
        pipeline("nested 2,000 deep", f"seed = {'[' * 2000}{']' * 2000}"),
        pipeline("a key of 50,000 parts", f"seed = 1\n{DEEP} = 1"),
        pipeline("such a key in a table", f"seed = {{ {DEEP} = 1 }}"),
        pipeline("such a key as a header", f"[{DEEP}]\n"),
        pipeline("a line of a mebibyte", f"seed = '{'1' * 2**20}'"),
        pipeline("a file of 64 mebibytes", b"x" * 2**26 + b"y"),
    ],
    "Pipeline files with other contents": [
        file("mistakes of every kind", "p.toml", MANY, "check p.toml --set nope.size=1"),
        pipeline("nothing", ""),
        pipeline("[stage] for [[stage]]", "[stage]\nname = 'a'"),
        pipeline("a stage without a name", "[[stage]]\ntrainer = 'sft'"),
        pipeline("a stage with a dot in its name", "[[stage]]\nname = 'a.b'\ntrainer = 'sft'"),
        pipeline("a stage named seed", "[[stage]]\nname = 'seed'\ntrainer = 'sft'"),
        pipeline("a stage without a trainer", "[[stage]]\nname = 'a'"),
        pipeline("a seed below 0", f"seed = -1\n{ONE}"),
        pipeline("a mesh that is a number", f"mesh = 8\n{ONE}"),
        pipeline("a mesh of none", f"mesh = {{ data = 0 }}\n{ONE}"),
        pipeline("a reward and a model of another kind", CHAIN),
        pipeline("a fresh model, and a stage that goes on with it", FRESH),
        pipeline("an epoch of no updates", f"{ONE}per_epoch_training_steps = 0"),
    ],
    "Models with a manifest": [
        manifest("of a reward model", '{"kind": "reward_model"}'),
        manifest("of a language model, and no more", '{"kind": "language_model"}'),
        manifest("a list for a kind", '{"kind": ["reward_model"]}'),
        manifest("a list", '["reward_model"]'),
        manifest("cut off", '{"kind": "reward_mo'),
    ],
    "What cannot be set": [
        not_set("a"),
        not_set("policy.seed"),
        not_set("b.size=1"),
        not_set("policy.rewards[7].weight=1"),
        not_set("policy.rewards.7.weight=1"),
        not_set("policy.rewards.weight=1"),
        not_set("policy.rewards.-1.weight=1"),
        not_set("policy.rewards[1]=length"),
        not_set("policy.loggers.0.name=x"),
        not_set("policy.num_generations.x.y=1"),
        not_set("policy.num_generations[0]=1"),
        not_set("policy.model[0]=1"),
        not_set("policy.model.0.x=1"),
        not_set("mesh[0]=1"),
        not_set("model=../modle"),
        typed(f"check policy.toml --set policy.{DEEP}=1", "a key of 50,000 parts"),
        typed(f"check policy.toml --set 'policy.lora={{ {DEEP} = 1 }}'", "such a key in a value"),
    ],
}
