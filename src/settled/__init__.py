"""Settled: every message is settled exactly one way."""
