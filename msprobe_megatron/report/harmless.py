"""Text out of files that others may have made, on its way to a terminal: nothing in it may steer the terminal."""

from __future__ import annotations

# Controls of the terminal, and those that turn the direction of writing around.
_CODES = (*range(10), *range(11, 32), *range(127, 160), 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
_STEERING = {code: "·" for code in _CODES}


def harmless(text: str) -> str:
    r"""The text with every character that steers, but the end of a line, shown as a dot.

    Example::

        >>> harmless("layer\x1b[2J")
        'layer·[2J'
    """
    return text.translate(_STEERING)
