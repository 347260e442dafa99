"""Layer numbers in canonical names; needs neither torch nor Megatron, so readers of run directories use it too."""

from __future__ import annotations


def layer_of(name: str) -> int | None:
    """Global layer number inside a canonical name.

    Example::

        >>> layer_of("decoder.layers.7.mlp")
        7
    """
    parts = name.split(".")
    for word, number in zip(parts, parts[1:], strict=False):
        if word == "layers" and number.isdigit():
            return int(number)
    return None
