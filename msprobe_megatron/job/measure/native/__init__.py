"""The compiled kernel that reads a tensor of host memory once, and how it is built.

`measure` calls it and has a fallback for every function in plain torch for where there is no compiler. Nothing is
built before a session asks (`load`), and a failure of any kind only means the fallback.
"""

from msprobe_megatron.job.measure.native.library import Kernel, kernel, load, why_not

__all__ = ["Kernel", "kernel", "load", "why_not"]
