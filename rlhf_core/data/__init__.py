"""Data in: files, hub datasets and objects to token ids, with every problem named by file and row."""

from rlhf_core.data.order import drawn, schedule, updates
from rlhf_core.data.preferences import Pair, Pairs, encode_pairs
from rlhf_core.data.prompts import Prompts, encode_prompts
from rlhf_core.data.records import load
from rlhf_core.data.report import Report
from rlhf_core.data.source import Records, Source
from rlhf_core.data.texts import Text, Texts, encode_texts
from rlhf_core.data.token_ids import require_vocabulary
from rlhf_core.data.whole import Whole, encode_whole, whole_parts

__all__ = [
    "Pair",
    "Pairs",
    "Prompts",
    "Records",
    "Report",
    "Source",
    "Text",
    "Texts",
    "Whole",
    "drawn",
    "encode_pairs",
    "encode_prompts",
    "encode_texts",
    "encode_whole",
    "load",
    "require_vocabulary",
    "schedule",
    "updates",
    "whole_parts",
]
