"""Run slow or untrusted user code: in a pool of processes, or on an event loop in a separate thread."""
