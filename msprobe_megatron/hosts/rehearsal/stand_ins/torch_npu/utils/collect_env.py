"""What MindSpeed asks about the machine."""


def get_cann_version() -> str:
    """A release that no host has a special case for."""
    return "8.0.0"
