"""``msprobe_megatron.integrations.slime``: re-export."""

from msprobe_megatron.hosts.integrations.slime import init

__all__ = ["init"]
