"""``msprobe_megatron.analyse``: reading a run from Python; lives in `msprobe_megatron.analysis`."""
