"""The base class of Megatron's own recipe."""


class DelayedScaling:
    """Inherited from, never made."""
