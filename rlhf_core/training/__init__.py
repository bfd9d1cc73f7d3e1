"""Shared parts of trainers: open models and data, forecast, choose attention, run from Python."""
