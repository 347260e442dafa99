"""Text out of files that others may have made, on its way to a terminal: nothing in it may steer the terminal."""

from __future__ import annotations

_STEERING = {code: "·" for code in (*range(10), *range(11, 32), *range(127, 160))}


def harmless(text: str) -> str:
    r"""The text with every control character but the end of a line shown as a dot.

    Example::

        >>> harmless("layer\x1b[2J")
        'layer·[2J'
    """
    return text.translate(_STEERING)
