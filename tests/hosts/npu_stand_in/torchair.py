"""Stands in for torchair, the graph mode of torch_npu: MindSpeed imports its names and registers converters with it."""

import sys
import types


def register_fx_node_ge_converter(_operator):
    return lambda converter: converter


class _Anything:
    def __class_getitem__(cls, _key):
        return cls


ge = types.ModuleType("torchair.ge")
ge.Tensor = ge.TensorSpec = ge.DataType = _Anything
sys.modules[ge.__name__] = ge
