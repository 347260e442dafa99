"""``msprobe_megatron.integrations``: the adapters live in `msprobe_megatron.hosts.integrations`."""
