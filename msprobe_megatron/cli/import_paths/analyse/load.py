"""``msprobe_megatron.analyse.load``: re-export."""

from msprobe_megatron.analysis.load.run import Run, open_run

__all__ = ["Run", "open_run"]
