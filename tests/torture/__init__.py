"""Experiments that try to make the suite lose something, hang, or answer bad input with a traceback."""
