"""Alerts: rules that look at the monitor's figures in the writer thread, one step late and never in training's way."""
