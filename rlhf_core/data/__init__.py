"""Read files, hub datasets and objects in memory as token ids; every error names the file and row.

Names of prompts and of whole sequences are resolved on first use: trainers of given texts need neither.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlhf_core.data.batch_order import batch_rows as batch_rows
from rlhf_core.data.batch_order import count_examples as count_examples
from rlhf_core.data.batch_order import count_updates as count_updates
from rlhf_core.data.batch_order import visited_rows as visited_rows
from rlhf_core.data.examples import Examples as Examples
from rlhf_core.data.examples import require_vocabulary as require_vocabulary
from rlhf_core.data.preferences import encode_pairs as encode_pairs
from rlhf_core.data.preferences import usable_pairs as usable_pairs
from rlhf_core.data.records import drop_columns as drop_columns
from rlhf_core.data.records import load as load
from rlhf_core.data.report import Report as Report
from rlhf_core.data.source import Dropped as Dropped
from rlhf_core.data.source import Example as Example
from rlhf_core.data.source import Source as Source
from rlhf_core.data.source import with_values as with_values
from rlhf_core.data.table import Records as Records
from rlhf_core.data.texts import encode_texts as encode_texts
from rlhf_core.data.texts import usable_texts as usable_texts

if TYPE_CHECKING:
    from rlhf_core.data.prompts import EpisodeRows as EpisodeRows
    from rlhf_core.data.prompts import PromptStream as PromptStream
    from rlhf_core.data.prompts import UntokenizedPrompts as UntokenizedPrompts
    from rlhf_core.data.prompts import encode_prompts as encode_prompts
    from rlhf_core.data.prompts import without_last_replies as without_last_replies
    from rlhf_core.data.whole_sequences import whole_parts as whole_parts

__all__ = ["Dropped", "Example", "Examples", "Source", "with_values"]
_PROMPTS = "EpisodeRows PromptStream UntokenizedPrompts encode_prompts without_last_replies"
_HOMES = {**dict.fromkeys(_PROMPTS.split(), "prompts"), "whole_parts": "whole_sequences"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rlhf_core.data' has no attribute '{name}'")
    return getattr(importlib.import_module(f"rlhf_core.data.{_HOMES[name]}"), name)
