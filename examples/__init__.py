"""Runnable examples; each one is a test too."""
