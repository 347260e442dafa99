"""``msprobe_megatron.integrations.ms_swift``: re-export."""

from msprobe_megatron.hosts.integrations.ms_swift import register

__all__ = ["register"]
