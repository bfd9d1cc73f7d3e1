"""The quickstart, which `rlhf demo` runs: a shop's orders and replies, and the pipeline that learns from them.

`words`, `generate` and `judge` need nothing but Python, and tokenizers where the tokenizer is written.
"""
