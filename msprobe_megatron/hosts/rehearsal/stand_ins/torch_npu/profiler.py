"""Imported by name; a rehearsal does not profile."""
