"""`msprobe-megatron logprobs`: the log-probs that two runs gave the same tokens."""

from __future__ import annotations

import argparse
import json

from msprobe_megatron.cli.commands import CANNOT, FOUND, OK

HELP = "compare the log-probs that two runs (trainer and engine) gave the same tokens"
EXAMPLE = "msprobe-megatron logprobs trainer engine --reference trainer_fp32"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument("left", metavar="A", help="run with forward passes, of the trainer")
    parser.add_argument("right", metavar="B", help="run with forward passes, of the engine")
    parser.add_argument(
        "--reference", metavar="RUN", help="a third run of higher precision: sets what rounding explains"
    )


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code: 1 if rounding does not explain the difference."""
    from msprobe_megatron.analysis.align.align import with_causes_of_weights
    from msprobe_megatron.analysis.align.logprobs import logprobs
    from msprobe_megatron.analysis.load.run import open_run
    from msprobe_megatron.report.terminal.logprobs import print_logprobs

    left, right = open_run(arguments.left), open_run(arguments.right)
    reference = open_run(arguments.reference) if arguments.reference else None
    result = with_causes_of_weights(logprobs(left, right, reference), left, right)
    if arguments.json:
        print(json.dumps(result.as_dict()))
    else:
        print_logprobs(result)
    if not result.samples:
        return CANNOT
    return OK if result.agree else FOUND
