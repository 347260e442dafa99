"""megatron.training.arguments: the kit's flags in Megatron's own parser, so that `--help` lists them.

`parse_args(extra_args_provider, ignore_unknown_args)` is the one signature that never moved from 0.6 to main.
The values are not read from Megatron's namespace, which `--yaml-cfg` replaces: the kit parses its flags itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from msprobe_megatron.config.flags import add_arguments
from msprobe_megatron.job.patching.patch_set import Patch


def _parse_args(original: Callable[..., Any], events: Any) -> Callable[..., Any]:
    def parse_args(extra_args_provider: Any = None, *args: Any, **kwargs: Any) -> Any:
        def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            if extra_args_provider is not None:
                parser = extra_args_provider(parser)
            add_arguments(parser)
            return parser

        return original(provider, *args, **kwargs)

    return parse_args


PATCHES = [
    Patch(
        "arguments.parse_args",
        ("megatron.training.arguments:parse_args",),
        _parse_args,
        phase="arguments",
        why="adds the --msprobe-* flags to Megatron's parser",
        sweep=True,
    )
]
