"""Reward functions: made from a config, checked before a run, and called on completions."""
