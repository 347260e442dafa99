"""The command line: ``msprobe-megatron COMMAND``, one file per command."""

from msprobe_megatron.cli.entry import main

__all__ = ["main"]
