"""Packing: trees of sequences in rows of static shapes, and the choice of those shapes."""

from rlhf_core.packing.layout import MICRO_BATCH_TOKENS as MICRO_BATCH_TOKENS
from rlhf_core.packing.layout import Layout as Layout
from rlhf_core.packing.layout_search import choose_layout as choose_layout
from rlhf_core.packing.rows import Packed as Packed
from rlhf_core.packing.rows import pack as pack
from rlhf_core.packing.trees import Tree as Tree
from rlhf_core.packing.trees import Trees as Trees
from rlhf_core.packing.trees import tree as tree

__all__ = ["Layout", "Packed", "Tree", "Trees", "pack"]
