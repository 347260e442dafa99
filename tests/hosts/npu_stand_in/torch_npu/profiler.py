"""Imported by name; no recipe that is tested profiles."""
