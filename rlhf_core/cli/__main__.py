"""`python -m rlhf_core.cli`: the command `rlhf`, where it is not on the path."""

from rlhf_core.cli import main

main()
