"""The process in which `math_verify` compares, run as a script; its argument is the seconds a comparison may take.

A line in is a JSON list [completion, answer]; a line out "right", "wrong" or "unreadable", said of the answer. What
takes too long ends the process: nothing else stops an integer power in its C code.
"""

from __future__ import annotations

import json
import logging
import signal
import sys


def main(seconds: float) -> None:
    from math_verify import parse, verify

    replies, sys.stdout = sys.stdout, sys.stderr
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends the process
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would warn of its own limits being off
    for line in sys.stdin:
        completion, answer = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        expected = parse(
            answer if "$" in answer or "\\boxed" in answer else f"${answer}$", parsing_timeout=None
        )
        found = parse(completion, parsing_timeout=None)
        right = expected and verify(expected, found, timeout_seconds=None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print("right" if right else "wrong" if expected else "unreadable", file=replies, flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
