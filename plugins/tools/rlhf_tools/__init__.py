"""The commands `rlhf demo`, `rlhf doctor`, `rlhf export` and `rlhf schema`."""
