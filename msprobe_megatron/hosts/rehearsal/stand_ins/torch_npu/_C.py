"""The corner of torch_npu's C++ side that MindSpeed looks into: options of process groups."""

from types import SimpleNamespace

_distributed_c10d = SimpleNamespace(ProcessGroupHCCL=SimpleNamespace(Options=type("Options", (), {})))
