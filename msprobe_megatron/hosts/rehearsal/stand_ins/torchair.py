"""Stands in for torchair, the graph mode of torch_npu: MindSpeed imports its names and registers converters with it."""

import sys
import types
from collections.abc import Callable
from typing import Any


def register_fx_node_ge_converter(_operator: Any) -> Callable[[Any], Any]:
    """Nothing is converted where there are no graphs."""
    return lambda converter: converter


class _Anything:
    def __class_getitem__(cls, _key: Any) -> Any:
        return cls


ge = types.ModuleType("torchair.ge")
for _name in ("Tensor", "TensorSpec", "DataType"):
    setattr(ge, _name, _Anything)
sys.modules[ge.__name__] = ge
