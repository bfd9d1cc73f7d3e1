"""Make an exported reward model score in other libraries as it does here, and describe how in its README.md."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from typing import Any

from rlhf_core.errors import warn
from rlhf_core.models import Model
from rlhf_core.models.model import with_padding_apart
from rlhf_core.scoring import ScoringContract
from rlhf_core.tokenizer.chat_template import PLAIN, cut_after_stop, template_text, templates_of
from rlhf_core.tokenizer.encoding import Encoder, special_ids
from rlhf_core.tokenizer.options import DATED, parse_date

PROBE = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "b a"}]


def for_other_libraries(model: Model, contract: ScoringContract) -> Model:
    """Put what the contract says about texts into the tokenizer: template, length, side of truncation, padding token.

    Warns where transformers' `apply_chat_template` would still make other tokens of a conversation.
    """
    tokenizer: Any = copy.deepcopy(model.tokenizer)
    tokenizer.name_or_path = ""  # or the files of its directory would be copied
    if contract.max_length is not None:
        tokenizer.model_max_length = contract.max_length
    tokenizer.truncation_side = "left" if contract.truncation_mode == "keep_end" else "right"
    tokenizer.init_kwargs["truncation_side"] = tokenizer.truncation_side
    encoder = Encoder(model.tokenizer, contract.text_options)
    if contract.chat_template is not None:
        tokenizer.chat_template = template_text(tokenizer, contract.chat_template)
    templates = templates_of(tokenizer)
    if templates:
        written = {name: _self_contained(text, encoder, contract) for name, text in templates.items()}
        tokenizer.chat_template = written if set(written) - {"default"} else written["default"]
        trained = encoder.whole([PROBE[:1]], [PROBE[1:]])[0].tolist()
        theirs = tokenizer.apply_chat_template(PROBE, return_dict=False)
        if trained != theirs:
            warn(
                "apply_chat_template of the exported tokenizer tokenizes conversations differently from the "
                "reward model's training, so its scores differ there; use the artifact for scoring"
            )
    return with_padding_apart(dataclasses.replace(model, tokenizer=tokenizer))


def _self_contained(template: str, encoder: Encoder, contract: ScoringContract) -> str:
    """Write into a template what this suite passes to it or changes in what it writes."""
    if template == PLAIN and int(encoder.tokenize([("a", True)])[0][0]) == encoder.special.bos:
        template = "{{- bos_token -}}" + template
    if contract.template_date is not None:
        day = parse_date(contract.template_date)
        template = re.sub(
            rf"""\b{DATED}\(\s*(['"])(.*?)\1\s*\)""",
            lambda found: json.dumps(day.strftime(found[2]), ensure_ascii=False),
            template,
        )
    if contract.read_at == "eos":
        template = _ended(template, encoder)
    for name, value in contract.chat_template_kwargs.items():
        literal = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
        template = f"{{%- if {name} is not defined %}}{{% set {name} = {literal} %}}{{% endif -%}}" + template
    if contract.system_prompt is not None:
        system = json.dumps(contract.system_prompt, ensure_ascii=False)
        template = (
            "{%- if not messages or messages[0]['role'] not in ['system', 'developer'] %}{% set messages = "
            f"[{{'role': 'system', 'content': {system}}}] + messages %}}{{% endif -%}}{template}"
        )
    return template


def _ended(template: str, encoder: Encoder) -> str:
    """Make a template end with the first stop token behind the last reply, as `read_at = "eos"` does."""
    text = encoder.chat.write(PROBE)
    kept = cut_after_stop(text, encoder.stops)
    whole = f"{{%- set whole %}}{template.removesuffix(chr(10))}{{% endset -%}}"
    if any(kept.endswith(stop) for stop in encoder.stops):
        rest = json.dumps(text[len(kept) :], ensure_ascii=False)
        if kept == text:
            return template
        return (
            f"{whole}{{{{- whole[:-{len(text) - len(kept)}] if not add_generation_prompt and "
            f"whole.endswith({rest}) else whole -}}}}"
        )
    return f"{whole}{{{{- whole + ('' if add_generation_prompt else eos_token) -}}}}"


def card(model: Model, contract: ScoringContract, base: str | None) -> str:
    """Write the README.md of an exported reward model. base: of an adapter that is exported alone."""
    tokenizer: Any = model.tokenizer
    ends = special_ids(tokenizer).eos
    end = f" + {tokenizer.decode([ends[0]])!r}" if ends else ""
    peft = "" if base is None else "from peft import PeftModel\n"
    load = 'model = AutoModelForSequenceClassification.from_pretrained("MODEL")'
    if base is not None:
        load = (
            f"model = AutoModelForSequenceClassification.from_pretrained({base!r}, num_labels=1)\n"
            'model.config.pad_token_id = tokenizer.pad_token_id\nmodel = PeftModel.from_pretrained(model, "MODEL")'
        )
    lines = [
        "# Reward model",
        "",
        "One score per conversation or text, read at its last token. MODEL is this directory.",
        "",
        "```python",
        f"import torch\n{peft}from transformers import AutoModelForSequenceClassification, AutoTokenizer",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("MODEL")\n{load}',
    ]
    options = "padding=True, truncation=True" if tokenizer.pad_token_id is not None else "truncation=True"
    if tokenizer.chat_template is not None:
        lines += [
            'messages = [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]',
            f'inputs = tokenizer.apply_chat_template(\n    [messages], {options}, return_tensors="pt", '
            "return_dict=True\n)",
        ]
        texts = "# plain texts, if it was trained on them: "
    else:
        texts = ""
    lines += [
        f'{texts}inputs = tokenizer(["…"{end}], {options}, return_tensors="pt")',
        "with torch.no_grad():\n    print(model(**inputs).logits[:, 0].tolist())",
        "```",
        "",
    ]
    if tokenizer.chat_template is not None:
        lines.append("- A conversation ends with the reply to score, without a generation prompt.")
    if end:
        lines.append(
            "- A plain text is a prompt and its completion, with the end-of-sequence token appended."
        )
    if contract.max_length is not None:
        kept = "end" if contract.truncation_mode == "keep_end" else "start"
        lines.append(
            f"- It was trained on at most {contract.max_length} tokens; truncation=True keeps their {kept}."
        )
    if contract.system_prompt is not None:
        prompt = json.dumps(contract.system_prompt, ensure_ascii=False)
        lines.append(f"- The chat template begins conversations without a system message with {prompt}.")
    if contract.mean is not None:
        lines.append(f"- Its scores had mean {contract.mean:.6g} and standard deviation {contract.std:.6g}.")
    if contract.compute_dtype is not None:
        lines.append(f"- It was trained in {contract.compute_dtype}.")
    return "\n".join(lines) + "\n"
