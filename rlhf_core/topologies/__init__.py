"""Compile a pipeline's programs for accelerators that are not there, and say what they would need and how fast they
could be.
"""
