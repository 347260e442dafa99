"""`msprobe-megatron launch`: an untouched launch recipe under the kit."""

from __future__ import annotations

import argparse

HELP = "run an untouched launch recipe under the kit, or rehearse it where there is no accelerator"
EXAMPLE = "msprobe-megatron launch --overlay modellink/llama2_7b -- examples/llama2/pretrain_llama2_7b_ptd.sh"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    from msprobe_megatron.hosts.launching import recipe

    recipe.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code, the launcher's where one was started."""
    from msprobe_megatron.hosts.launching import recipe

    return recipe.run(arguments)
