"""``msprobe_megatron.integrations.megatron_bridge``: re-export."""

from msprobe_megatron.hosts.integrations.megatron_bridge import ProbeCallback

__all__ = ["ProbeCallback"]
