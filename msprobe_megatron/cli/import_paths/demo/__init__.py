"""``msprobe_megatron.demo``: the demo job lives in `msprobe_megatron.lab.demo`."""
