"""A server of policies and reward models over HTTP: the command `rlhf serve`."""
