"""Collectives and point-to-point communication, announced on one bus."""
