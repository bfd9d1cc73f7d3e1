"""Pack trees of sequences into rows of static shapes, and choose those shapes."""

from rlhf_core.packing.layout import Layout
from rlhf_core.packing.layout_search import choose_layout
from rlhf_core.packing.rows import Packed, pack
from rlhf_core.packing.trees import Tree, Trees, tree

__all__ = ["Layout", "Packed", "Tree", "Trees", "choose_layout", "pack", "tree"]
