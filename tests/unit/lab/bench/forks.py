"""Benches that train, in a fork: a process that has trained cannot fork the ranks of the tests that come after."""

import contextlib
import io

from msprobe_megatron.cli import main
from tests.support.forked import run_forked


def _captured(words):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        return [main(words), out.getvalue()]


def bench(*words):
    """Exit code and standard output of ``msprobe-megatron bench WORDS``."""
    return run_forked(1, _captured, ["bench", *words])[0]


def forked(function, *args):
    """What the function returns."""
    return run_forked(1, function, *args)[0]
