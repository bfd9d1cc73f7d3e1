"""The command `rlhf`. It imports nothing heavy before a command runs, so that `--help` is instant."""

from rlhf_core.cli.exits import BAD_INPUT as BAD_INPUT
from rlhf_core.cli.exits import DONE as DONE
from rlhf_core.cli.exits import FAILED as FAILED
from rlhf_core.cli.exits import STOPPED as STOPPED
from rlhf_core.cli.program import app as app
from rlhf_core.cli.program import main as main
