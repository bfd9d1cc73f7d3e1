"""Read files, hub datasets and objects in memory as token ids; every error names the file and row."""

from rlhf_core.data.batch_order import batch_rows, count_updates, visited_rows
from rlhf_core.data.encoded import Pairs, Texts
from rlhf_core.data.preferences import encode_pairs
from rlhf_core.data.prompts import Prompts, encode_prompts
from rlhf_core.data.records import load
from rlhf_core.data.source import Records
from rlhf_core.data.texts import encode_texts
from rlhf_core.data.token_ids import require_vocabulary

__all__ = [
    "Pairs",
    "Prompts",
    "Records",
    "Texts",
    "batch_rows",
    "count_updates",
    "encode_pairs",
    "encode_prompts",
    "encode_texts",
    "load",
    "require_vocabulary",
    "visited_rows",
]
