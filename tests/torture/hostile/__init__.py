"""Doors through which a hostile text comes in, and how what comes out is judged."""
