"""Whole jobs on Spark: run a handler, export, report, redrive, and the demonstration."""
