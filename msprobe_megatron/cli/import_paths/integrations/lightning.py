"""``msprobe_megatron.integrations.lightning``: re-export."""

from msprobe_megatron.hosts.integrations.lightning import ProbeCallback

__all__ = ["ProbeCallback"]
