"""Layer numbers in canonical names; needs neither torch nor Megatron, so readers of run directories use it too."""

from __future__ import annotations


def layer_of(name: str) -> int | None:
    """Global layer number inside a canonical name; None for layers of multi-token prediction, which are numbered apart.

    Example::

        >>> layer_of("decoder.layers.7.mlp"), layer_of("mtp.layers.0.transformer_layer.mlp")
        (7, None)
    """
    parts = name.split(".")
    if parts[0] == "mtp":
        return None
    for word, number in zip(parts, parts[1:], strict=False):
        if word == "layers" and number.isdigit():
            return int(number)
    return None
