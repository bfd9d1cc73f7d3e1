"""Tokenizers and chat templates of the kinds that people use, so small that a test can follow every token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = [
    "<s>",
    "</s>",
    "<unk>",
    "<pad>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin|>",
    "<|head|>",
    "<|/head|>",
    "<|eot|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<|endoftext|>",
]


def byte_level(
    *, bos: str | None = None, adds_bos: bool = False, eos: str | None = "</s>", pad: str | None = "<pad>",
    closes: bool = False, trim: bool = False, added: Sequence[str] = (),
) -> Any:  # fmt: skip
    """GPT-2's kind. Merges cross the borders of turns: a blank with a letter, line ends with each other and a colon.

    adds_bos, closes: it puts BOS before, EOS behind every text. trim: its offsets leave white space out, as Llama 3's.
    added: tokens that are not special, so that decoding does not skip them.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        ("Ġ", "a"),
        ("Ġ", "Ġ"),
        ("Ċ", "Ċ"),
        (":", "Ċ"),
        ("a", "b"),
        ("ĊĊ", "Ċ"),
        ("i", "n"),
        ("]", "Ġa"),
    ]
    words = [*alphabet, *(a + b for a, b in merges)]
    special = [token for token in SPECIAL if token not in added]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate([*special, *words])}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    steps: list[Any] = [processors.ByteLevel(trim_offsets=trim)]
    if adds_bos or closes:
        single = " ".join([bos or ""] * adds_bos + ["$A"] + [eos or ""] * closes)
        ends = [(token, SPECIAL.index(token)) for token in (bos, eos) if token]
        steps.append(processors.TemplateProcessing(single=single, special_tokens=ends))
    backend.post_processor = processors.Sequence(steps)
    backend.add_special_tokens(special)
    backend.add_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=pad)


def sentencepiece() -> Any:
    """Llama 2's kind: a space in front of every text, which stands in the first token of a word; BOS; bytes."""
    pieces = ["▁", *"abcdefghijklmnopqrstuvwxyzABCDINSTUYS[]/:<>.,!?'\"{}0123456789_|", "▁a", "▁b", "ab"]
    merges = [("▁", "a"), ("▁", "b"), ("a", "b")]
    vocabulary = dict.fromkeys([*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces])
    backend = Tokenizer(
        models.BPE({t: i for i, t in enumerate(vocabulary)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|head|>' + m['role'] + '<|/head|>\\n\\n' + m['content'] | trim }}"
    "{{ '<|eot|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}"
)
LLAMA2 = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- for m in (messages[1:] if system else messages) -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}
{%- if m.role == 'user' -%}
{{ bos_token + '[INST] ' }}{% if system and loop.first %}{{ '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' }}{% endif %}
{{- m.content.strip() + ' [/INST]' }}
{%- else -%}{{ ' ' + m.content.strip() + ' ' + eos_token }}{%- endif -%}
{%- endfor -%}
"""
STRIPS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}{% if m.role == 'assistant' %}{{ eos_token }}"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
GEMMA = """\
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
{%- for m in messages -%}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' -}}
{{- m.content | trim + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""
PHI = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
)
TOOLS = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS = (
    "{%for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{%generation%}{{ m.content }}"
    "<|im_end|>{%endgeneration-%}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""{% generation %} where some write it: without blanks, with dashes."""
MARKS_CONTENT = MARKS.replace("<|im_end|>{%endgeneration-%}", "{%endgeneration-%}<|im_end|>")
"""Its marks leave out the token that ends the turn."""
THINKS = CHATML.replace(
    "'<|im_start|>assistant\\n' }}{% endif", "'<|im_start|>assistant\\n<think>\\n' }}{% endif"
)
"""Its generation prompt opens a thought that it does not write before a reply."""
FORGETS = """\
{%- for m in messages -%}
{%- set said = m.content.split('</think>')[-1].lstrip() if m.role == 'assistant' and not loop.last else m.content -%}
{{- '<|im_start|>' + m.role + '\\n' + said + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
"""It leaves the thoughts of earlier replies out."""


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def tool(name: str, description: str = "It does things.", **types: str) -> dict[str, Any]:
    """The JSON schema of a tool with parameters of these types."""
    properties = {key: {"type": kind, "description": "What."} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


ASKED = [user("a bab"), assistant(" ab ab\n"), user("abc?\n")]
REPLY = "a  b\n\n\nin: é"
SYSTEM = {"role": "system", "content": "be in"}


@dataclass(frozen=True)
class Case:
    """A template with a tokenizer. stops: the token that ends a turn first, then the others."""

    tokenizer: Any
    template: str | None
    stops: tuple[str, ...] = ("</s>",)
    prompt: list[dict[str, Any]] = field(default_factory=lambda: [SYSTEM, *ASKED])
    tools: list[dict[str, Any]] | None = None
    joins: bool = True
    """Whether prompt and sampled reply give the ids of the whole: no merge crosses the border, nothing is stripped."""


def cases() -> dict[str, Case]:
    """Templates as the tokenizer's own; None is "plain" beside a tokenizer without one."""
    chatml = {"eos": "<|im_end|>", "pad": "<|endoftext|>"}
    found = {
        "plain": Case(byte_level(), None),
        "plain, adds BOS and EOS": Case(byte_level(bos="<s>", adds_bos=True, closes=True), None),
        "plain, sentencepiece": Case(sentencepiece(), None),
        "plain, no EOS": Case(byte_level(eos=None, pad=None), None, ()),
        "chatml": Case(byte_level(**chatml), CHATML, ("<|im_end|>",)),
        "chatml, the end of turn is not EOS": Case(
            byte_level(eos="<|endoftext|>", pad="<|endoftext|>"), CHATML, ("<|im_end|>", "<|endoftext|>")
        ),
        "chatml, no EOS": Case(byte_level(eos=None, pad=None), CHATML, ("<|im_end|>",)),
        "chatml, pad is EOS": Case(byte_level(eos="<|im_end|>", pad="<|im_end|>"), CHATML, ("<|im_end|>",)),
        "chatml, its tokens not special": Case(
            byte_level(added=("<|im_start|>", "<|im_end|>")), CHATML, ("<|im_end|>", "</s>")
        ),
        "llama 3, adds BOS": Case(
            byte_level(bos="<|begin|>", adds_bos=True, eos="<|eot|>", trim=True), LLAMA3, ("<|eot|>",)
        ),
        "llama 3, sentencepiece": Case(sentencepiece(), LLAMA3, ("<|eot|>", "</s>")),
        "llama 2": Case(sentencepiece(), LLAMA2),
        "llama 2, bytes": Case(byte_level(bos="<s>", adds_bos=True), LLAMA2, joins=False),
        "strips": Case(byte_level(pad=None), STRIPS),
        "gemma": Case(
            byte_level(bos="<s>", adds_bos=True), GEMMA, ("<end_of_turn>", "</s>"), prompt=list(ASKED)
        ),
        "phi": Case(byte_level(eos="<|endoftext|>"), PHI, ("<|end|>", "<|endoftext|>"), prompt=list(ASKED)),
        "tools": Case(
            byte_level(**chatml),
            TOOLS,
            ("<|im_end|>",),
            tools=[{"type": "function", "function": {"name": "f", "parameters": {"x": "int"}}}],
        ),
        "marks": Case(byte_level(**chatml, trim=True), MARKS, ("<|im_end|>",)),
        "marks without the end of turn": Case(byte_level(**chatml), MARKS_CONTENT, ("<|im_end|>",)),
        "thinks": Case(byte_level(**chatml), THINKS, ("<|im_end|>",), joins=False),
        "forgets": Case(byte_level(**chatml), FORGETS, ("<|im_end|>",)),
    }
    for case in found.values():
        case.tokenizer.chat_template = case.template
    return found
