"""Runs untouched launch recipes under the kit: re-routes their launcher, applies an overlay, keeps the exit code.

Nothing here runs inside a training process but `no_save`, before the script does; the scripts in ``scripts/`` are its
users.
"""
