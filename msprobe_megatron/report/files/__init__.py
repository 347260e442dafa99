"""Findings as files: CSV, databases."""
