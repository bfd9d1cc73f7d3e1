"""Packing: trees of sequences, the rows they are laid out in, and the search for a layout."""
