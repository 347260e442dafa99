"""The compiled kernel that reads a tensor of host memory once, and how it comes into being.

Stands beside ``measure``, which calls it and has a twin of every function in plain torch for where there is no
compiler. Nothing is built before a session asks (`load`), and a failure of any kind only means the twin.
"""

from msprobe_megatron.native.library import Kernel, kernel, load, why_not
from msprobe_megatron.native.looking import kernel_addresses, load_look, look, why_no_look

__all__ = ["Kernel", "kernel", "kernel_addresses", "load", "load_look", "look", "why_no_look", "why_not"]
