"""Run the command `rlhf` as `python -m rlhf_core.cli`, where it is not on the path."""

from rlhf_core.cli import main

main()
