"""``msprobe_megatron.integrations.verl``: re-export."""

from msprobe_megatron.hosts.integrations.verl import attach_engine

__all__ = ["attach_engine"]
