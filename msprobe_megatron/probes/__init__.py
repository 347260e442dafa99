"""Probes decide what is measured, and when: the only readers of the probe file's sections."""
