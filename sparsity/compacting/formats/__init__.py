"""Formats of kept values: one class each."""
