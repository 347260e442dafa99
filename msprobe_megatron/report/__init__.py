"""Formats what `analyse` found; computes nothing itself."""
