"""The golden pipelines: what is typed, and the files that this names beside those of inputs.py.

Models have sixteen numbers per token and runs few updates. Processors round differently, and the recorded values must
hold on all: AdamW's eps is large, since a gradient that is nearly zero would be an update of full size whose sign is
rounding, and learning rates are small. `XLA_FLAGS=--xla_cpu_max_isa=SSE4_2` tries another processor.
"""

from __future__ import annotations

from dataclasses import dataclass, field

LLAMA = (
    'model = { model_type = "llama", hidden_size = 16, num_hidden_layers = 2, num_attention_heads = 2, '
    "num_key_value_heads = 1, intermediate_size = 24, max_position_embeddings = 128, initializer_range = 0.2, "
    'tokenizer = "tok" }'
)
MIXTRAL = LLAMA.replace('"llama"', '"mixtral", num_local_experts = 4, num_experts_per_tok = 2')
GEMMA4 = (
    'model = { model_type = "gemma4_text", hidden_size = 16, intermediate_size = 24, num_hidden_layers = 4, '
    "num_attention_heads = 2, num_key_value_heads = 1, head_dim = 8, global_head_dim = 16, sliding_window = 8, "
    'layer_types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"], '
    "num_kv_shared_layers = 2, hidden_size_per_layer_input = 4, rms_norm_eps = 0.01, initializer_range = 0.2, "
    'vocab_size_per_layer_input = 64, vocab_size = 64, tokenizer = "tok" }'
)
QWEN3_5 = (
    'model = { model_type = "qwen3_5_text", hidden_size = 16, intermediate_size = 24, num_hidden_layers = 2, '
    "num_attention_heads = 2, num_key_value_heads = 1, head_dim = 8, initializer_range = 0.2, "
    'layer_types = ["linear_attention", "full_attention"], linear_num_key_heads = 2, linear_num_value_heads = 2, '
    'linear_key_head_dim = 4, linear_value_head_dim = 4, max_position_embeddings = 128, tokenizer = "tok" }'
)
STEPS = """total_batch_size = 8
max_training_steps = 4
learning_rate = 1e-3
optimizer = { name = "adamw", eps = 1e-3 }
log_steps = 1
"""


def pipeline(*stages: str, head: str = "") -> str:
    """Return a pipeline file with these stages, "NAME TRAINER" and the lines of its table."""
    tables = []
    for stage in stages:
        first, _, lines = stage.partition("\n")
        name, trainer = first.split()
        tables.append(f'[[stage]]\nname = "{name}"\ntrainer = "{trainer}"\n{lines}')
    return f'dir = "run"\nseed = 3\n{head}' + "\n".join(tables)


FEW = STEPS.replace("max_training_steps = 4", "max_training_steps = 2")
"""Of families whose gradients are large: an update turns rounding into more of it."""


def rollouts(updates: int = 3, generations: int = 4) -> str:
    """Return the lines of a stage that samples eight completions an update."""
    return f"""total_batch_size = 8
max_evaluation_steps = 0
num_generations = {generations}
max_training_steps = {updates}
learning_rate = 1e-3
optimizer = {{ name = "adamw", eps = 1e-3 }}
log_steps = 1
max_prompt_length = 24
sampling = {{ max_completion_length = 6 }}
"""


@dataclass(frozen=True)
class Golden:
    """A pipeline and what is typed.

    commands: the arguments of `rlhf`, one after another in one process. ends: their exit codes, where not 0. here:
    whether `make test` compares it with recorded values; `make goldens` compares all. processes: of one job. serves:
    whether `rlhf serve` has a model for it, which the pipeline SERVED makes.
    """

    toml: str
    commands: tuple[str, ...] = ("check p.toml", "run p.toml")
    ends: dict[int, int] = field(default_factory=dict)
    here: bool = True
    devices: int = 1
    processes: int = 1
    serves: bool = False


BASE = f"base sft\n{LLAMA}\ntrain_data = 'texts.jsonl'\n{STEPS}max_sequence_length = 24\n"
SERVED = pipeline(BASE).replace('dir = "run"', 'dir = "served"')
GOLDENS = {
    "sft": Golden(
        pipeline(
            f"""base sft
{LLAMA}
train_data = ["texts.jsonl", {{ path = "chats.jsonl", weight = 0.5 }}]
eval_data = {{ plain = "texts.heldout.jsonl", chats = "chats.jsonl" }}
{STEPS}gradient_accumulation_steps = 2
scheduler = "cosine"
warmup_steps = 1
save_steps = 2
save_total_limit = 1
evaluation_steps = 2
eval_on_start = true
load_best_model_at_end = true
metric_for_best_model = "plain_loss"
max_sequence_length = 14
overlong = "truncate"
previews = {{ prompts = ["mia with the"], every = 2, max_new_tokens = 4 }}
log_weights = {{ pattern = "mlp", every = 2 }}
log_grad_norms = true
"""
        ),
        (
            "train sft --model tok --train_data texts.jsonl --dir none",
            "check p.toml",
            "run p.toml",
            "generate run/base/artifacts/model prompts.heldout.jsonl -o out.jsonl --max_completion_length 8 "
            "--num_generations 2 --temperature 0.8 --top_k 20 --seed 5",
            "generate run/base/artifacts/model --prompt 'mia with' --temperature 0 --max_completion_length 6",
        ),
        ends={0: 2},
    ),
    "reward": Golden(
        pipeline(
            f"""rm reward
{LLAMA}
train_data = "pairs.jsonl"
eval_data = "pairs.heldout.jsonl"
{STEPS}center_rewards_coefficient = 0.01
evaluation_steps = 1
early_stopping_patience = 2
frozen_parameters = 'layers\\.0\\.'
max_sequence_length = 24
"""
        ),
        (
            "check p.toml",
            "run p.toml",
            "score run/rm/artifacts/model pairs.heldout.jsonl -o scores.jsonl",
        ),
    ),
    "dpo": Golden(
        pipeline(
            BASE,
            f"""policy dpo
model = "base.model"
train_data = "pairs.jsonl"
eval_data = "pairs.heldout.jsonl"
{STEPS}loss = {{ name = "sigmoid", label_smoothing = 0.1 }}
beta = 0.3
evaluation_steps = 2
max_sequence_length = 24
""",
        )
    ),
    "simpo": Golden(
        pipeline(
            f"""policy dpo
{LLAMA}
train_data = "pairs.jsonl"
eval_data = "pairs.heldout.jsonl"
{STEPS}loss = {{ name = "simpo", gamma = 0.5 }}
evaluation_steps = 2
max_sequence_length = 24
"""
        )
    ),
    "kto": Golden(
        pipeline(
            BASE,
            f"""policy kto
model = "base.model"
train_data = "pairs.jsonl"
eval_data = "pairs.heldout.jsonl"
{STEPS}beta = 0.3
desirable_weight = 1.1
evaluation_steps = 2
max_sequence_length = 24
""",
        )
    ),
    "grpo": Golden(
        pipeline(
            f"""policy grpo
{LLAMA}
train_data = "prompts.jsonl"
eval_data = "prompts.heldout.jsonl"
rewards = ["rewards.py:brevity", {{ name = "rewards.py:names_it", weight = 0.5 }}, "rewards.py:sometimes"]
{rollouts(6).replace("max_evaluation_steps = 0", "")}num_iterations = 2
kl = {{ name = "k3", beta = 0.1 }}
sync_ref_model = true
ref_model_sync_steps = 4
loss = "dapo"
evaluation_steps = 4
save_steps = 3
"""
        )
    ),
    "online_dpo": Golden(
        pipeline(
            BASE,
            f"""policy online_dpo
model = "base.model"
train_data = "prompts.jsonl"
eval_data = "prompts.heldout.jsonl"
rewards = ["rewards.py:brevity", {{ name = "rewards.py:sometimes", weight = 0.5 }}]
{rollouts().replace("max_evaluation_steps = 0", "evaluation_steps = 2")}beta = 0.3
loss = {{ name = "sigmoid", label_smoothing = 0.1 }}
num_iterations = 2
""",
        )
    ),
    "distill": Golden(
        pipeline(
            BASE,
            f"""policy distill
{LLAMA}
teacher = "base.model"
train_data = "prompts.jsonl"
{rollouts().replace("num_generations = 4", "")}""",
        )
    ),
    "resumed": Golden(
        pipeline(
            f"""policy grpo
{LLAMA}
train_data = "prompts.jsonl"
rewards = ["rewards.py:interrupted"]
{rollouts(5)}save_steps = 1
kl = {{ name = "k3", beta = 0.1 }}
"""
        ),
        ("run p.toml", "run p.toml", "run p.toml"),
        ends={0: 1},
    ),
    "lora": Golden(
        pipeline(
            BASE,
            f"""policy grpo
model = "base.model"
lora = {{ rank = 2, alpha = 4, targets = ["q_proj", "up_proj"] }}
train_data = "prompts.jsonl"
rewards = ["rewards.py:brevity"]
{rollouts()}kl = {{ name = "k3", beta = 0.1 }}
""",
        )
    ),
    "tools": Golden(
        pipeline(
            f"""asks grpo
{LLAMA}
train_data = "asked.jsonl"
environment = {{ tools = ["tools.py:price"], max_turns = 3 }}
rewards = ["rewards.py:last_words"]
{rollouts().replace("max_prompt_length = 24", "max_prompt_length = 96")}"""
        )
    ),
    "chain": Golden(
        pipeline(
            BASE,
            f"""rm reward
model = "base.model"
train_data = "pairs.jsonl"
{STEPS}max_sequence_length = 24
""",
            f"""policy grpo
model = "base.model"
train_data = "prompts.jsonl"
rewards = [{{ name = "model", model = "rm.model" }}]
{rollouts()}""",
            head="mesh = { fsdp = 2 }\n",
        ),
        devices=2,
    ),
    "experts": Golden(
        pipeline(
            f"""base sft
{MIXTRAL}
train_data = "texts.jsonl"
router_aux_loss_coef = 0.01
{STEPS}max_sequence_length = 24
""",
            f"""policy grpo
model = "base.model"
train_data = "prompts.jsonl"
rewards = ["rewards.py:brevity"]
{rollouts()}""",
        )
    ),
    "stream": Golden(
        pipeline(
            f"""base sft
{LLAMA}
train_data = [{{ path = "texts.jsonl", streaming = true }}, {{ path = "chats.jsonl", weight = 0.5 }}]
eval_data = {{ path = "texts.heldout.jsonl", streaming = true }}
max_evaluation_steps = 1
shuffle_buffer = 8
{STEPS}max_sequence_length = 24
"""
        )
    ),
    "ppo": Golden(
        pipeline(
            f"""rm reward
{LLAMA}
train_data = "pairs.jsonl"
{STEPS}max_sequence_length = 24
""",
            f"""policy ppo
{LLAMA}
train_data = "prompts.jsonl"
rewards = [{{ name = "model", model = "rm.model" }}]
kl_coefficient = 0.05
{rollouts(generations=2)}""",
        ),
        (
            "check p.toml --plugin ROOT/examples/plugins/rlhf-ppo/rlhf_ppo.py",
            "run p.toml --plugin ROOT/examples/plugins/rlhf-ppo/rlhf_ppo.py",
        ),
    ),
    "names": Golden(
        pipeline(
            f"""rm reward
{LLAMA}
dataset_name = "pairs.jsonl"
total_batch_size = 8
max_steps = 3
learning_rate = 1e-3
extra_optimizer_kwargs = {{ eps = 1e-3 }}
clip_grad = 0.5
max_length = 24
attn_mechanism = "vanilla"
generation_interval = 0
do_last_save = false
use_wandb = true
wandb_entity = "nobody"
log_steps = 1
""".replace("dataset_name", "train_data").replace("max_steps", "max_training_steps"),
            f"""policy grpo
{LLAMA}
train_data = "prompts.jsonl"
reward_funcs = ["rewards.py:brevity"]
loss_type = "dr_grpo"
epsilon = 0.1
beta = 0.1
temperature = 0.9
max_completion_length = 6
{rollouts().replace("sampling = { max_completion_length = 6 }", "")}""".replace("reward_funcs", "rewards"),
        )
    ),
    "families": Golden(
        pipeline(
            f"gemma sft\n{GEMMA4}\ntrain_data = 'texts.jsonl'\n{FEW}max_sequence_length = 24\n",
            f"qwen sft\n{QWEN3_5}\ntrain_data = 'texts.jsonl'\n{FEW}max_sequence_length = 24\n",
            f"""policy grpo
model = "qwen.model"
train_data = "prompts.jsonl"
rewards = ["rewards.py:brevity"]
{rollouts(2)}""",
            'flax sft\nmodel = { model_type = "small", hidden_size = 16, tokenizer = "tok" }\n'
            f"train_data = 'texts.jsonl'\n{FEW}max_sequence_length = 24\n",
        ),
        ("check p.toml --plugin small.py", "run p.toml --plugin small.py"),
    ),
    "ahead": Golden(
        pipeline(
            f"""policy grpo
model = "served/base/artifacts/model"
train_data = "prompts.jsonl"
rewards = ["rewards.py:brevity"]
rollouts_ahead = 1
sampler = {{ name = "rlhf", urls = ["URL"], weights = "disk", directory = "policies" }}
{rollouts()}"""
        ),
        ("run p.toml",),
        here=False,
        serves=True,
    ),
    "turns": Golden(
        pipeline(
            f"""policy grpo
{LLAMA}
train_data = "prompts.jsonl"
environment = {{ name = "world.py:Tries", tries = 2, max_turns = 4 }}
{rollouts()}"""
        ),
        here=False,
    ),
    "processes": Golden(
        pipeline(BASE, head="mesh = { data = 2 }\n"), ("run p.toml",), here=False, processes=2
    ),
    "pallas": Golden(
        pipeline(
            f"""base sft
{LLAMA}
train_data = "texts.jsonl"
attention = "interpreted"
{STEPS}max_sequence_length = 24
"""
        ),
        ("run p.toml --plugin interpreted.py",),
        here=False,
    ),
}
