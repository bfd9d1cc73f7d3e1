"""Log a stage's progress: to the terminal, and to metrics.jsonl.

Each logger is an object with hooks as methods, exactly like a plugin's logger.
"""
