"""Whether a command line asks for the kit: the one test that a job without it pays for."""

import os


def asked(argv: list[str]) -> bool:
    """True for any `--msprobe-*` flag, for $MSPROBE_CONFIG, and for `--help`, which shall list the flags.

    Example::

        >>> asked(["--lr", "0.1", "--msprobe-config=probe.yaml"])
        True
    """
    if os.environ.get("MSPROBE_CONFIG"):
        return True
    return any(word.startswith("--msprobe-") or word in ("-h", "--help") for word in argv)
