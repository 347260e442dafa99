"""Rows, graphs and trends for other programs."""
