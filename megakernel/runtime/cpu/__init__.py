"""Runs programs on CPU threads."""
