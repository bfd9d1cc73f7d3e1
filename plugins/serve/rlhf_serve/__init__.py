"""Serve policies and reward models over HTTP: the command `rlhf serve`."""
