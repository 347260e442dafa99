"""Stands in for CANN's acl: hosts ask it which chip this is."""


def get_soc_name() -> str:
    """A chip that no host has a special case for."""
    return "stand-in"
