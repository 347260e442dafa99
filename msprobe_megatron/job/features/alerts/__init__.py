"""Alerts: rules that judge the statistics of the monitor in the writer thread, one step late."""
