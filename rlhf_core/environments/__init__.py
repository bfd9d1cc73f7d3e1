"""Environments that a policy talks with in several turns."""
