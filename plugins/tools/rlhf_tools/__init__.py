"""The commands `rlhf demo`, `rlhf doctor` and `rlhf schema`."""
