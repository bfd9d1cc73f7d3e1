"""Run slow or untrusted user code: in a pool of processes, or on an event loop in a separate thread."""

from rlhf_core.workers.event_loop import awaited as awaited
from rlhf_core.workers.event_loop import call_now as call_now
from rlhf_core.workers.event_loop import is_async as is_async
from rlhf_core.workers.event_loop import outcome_of as outcome_of
from rlhf_core.workers.event_loop import run_async as run_async
from rlhf_core.workers.event_loop import start_async as start_async
from rlhf_core.workers.pickling import ByName as ByName
from rlhf_core.workers.pickling import UnsendableError as UnsendableError
from rlhf_core.workers.pool import DiedError as DiedError
from rlhf_core.workers.pool import Pool as Pool
from rlhf_core.workers.pool import RaisedError as RaisedError
from rlhf_core.workers.pool import TooSlowError as TooSlowError
from rlhf_core.workers.pool import close as close
from rlhf_core.workers.pool import cores as cores
from rlhf_core.workers.pool import describe_failure as describe_failure
