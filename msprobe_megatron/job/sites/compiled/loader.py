"""Loads the compiled hot path: built for the running torch and Python and self-tested, once per process.

Needs the headers of both, which torch's wheel and most Pythons include. Where they are missing, or the build or the
self-test fails, the Python code does the same.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
import sysconfig
from pathlib import Path
from typing import Any

from msprobe_megatron.job.measure.native.build import BuildError, Recipe, built
from msprobe_megatron.job.measure.native.levels import PLAIN
from msprobe_megatron.job.measure.native.library import FLOAT32, kernel

NO_ROOM, UNSUPPORTED = -2, -3
"""Return values of `TensorCache.see` that are not slots, as in module.cpp."""
_NAME = "msprobe_hooks"
_PARTS = (
    "device_slots.h",
    "tensor_cache.h",
    "row_writer.h",
    "module_hooks.h",
    "module_hooks_type.h",
    "autograd_nodes.h",
    "api_calls.h",
    "api_calls_type.h",
)


class _State:
    """Outcome of the one attempt of this process."""

    attempted = False
    module: Any = None
    reason = "not requested"


def module() -> Any | None:
    """The compiled module (`TensorCache`, `RowWriter`, `Hook`, `Calls` …) if `load` has succeeded."""
    return _State.module


def why_not() -> str:
    """Why there is no module; empty if there is one."""
    return _State.reason


def load(timeout: float = 120.0) -> Any | None:
    """Find or build the module, once per process; None, with a reason in `why_not`, if that is impossible."""
    if not _State.attempted:
        _State.attempted = True
        try:
            _State.module, _State.reason = _attempt(timeout), ""
        except (BuildError, OSError, ImportError, AttributeError, RuntimeError) as error:
            _State.reason = str(error)
    return _State.module


def _attempt(timeout: float) -> Any:
    if os.environ.get("MSPROBE_NATIVE", "1") == "0" or kernel() is None:
        raise BuildError("no compiled kernel")
    path = _built(timeout)
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(path))
    spec = importlib.util.spec_from_file_location(_NAME, str(path), loader=loader)
    if spec is None:
        raise ImportError(f"{path}: cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    if not _passes_self_test(module):
        raise BuildError(f"{path}: self-test failed")
    return module


def _built(timeout: float) -> Path:
    """Build with C++20, which headers of new torch releases need, else with C++17, for old compilers."""
    try:
        return built(PLAIN, timeout / 2, _recipe("c++20"))
    except BuildError:
        return built(PLAIN, timeout / 2, _recipe("c++17"))


def _recipe(standard: str = "c++20") -> Recipe:
    import torch

    root, python = Path(torch.__file__).parent, sysconfig.get_paths()["include"]
    if not (Path(python) / "Python.h").is_file():
        raise BuildError(f"{python}: no Python.h")
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    # Versions are among the flags so that another torch or Python gets another library.
    flags = (
        f"-std={standard}",
        "-O2",
        "-shared",
        "-fPIC",
        "-w",
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        "-DAT_PER_OPERATOR_HEADERS",  # the headers of all operators take seconds to parse
        f"-DTORCH={torch.__version__}",
        f"-DPYTHON={sysconfig.get_config_var('SOABI')}",
        f"-I{root / 'include'}",
        f"-I{python}",
    )
    libraries = (f"-L{root / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10")
    return Recipe("hooks", Path(__file__).with_name("module.cpp"), flags, libraries, _PARTS)


def _passes_self_test(module: Any) -> bool:
    import torch

    with torch.inference_mode(False), torch.no_grad():
        x = torch.tensor([1.0, -2.0, 0.0, 4.0])
        table = torch.zeros((5, 9), dtype=torch.int64)
        addresses = [table[n].data_ptr() for n in range(5)]
        kinds = (torch.Tensor, torch.nn.Parameter)
        context = module.MeasureContext(
            module.Counter(), lambda slot: -1, addresses, *kernel_addresses(), *kinds, [(x, FLOAT32, 0)], None
        )
        seen = module.TensorCache(context)
        answers = [seen.see(x), seen.see(x), seen.see(x.view(2, 2)), seen.see(x[1:]), seen.see(x.to(torch.int32))]
        answers += [seen.see(x.add_(1)), seen.see(x[::2])]
        statistics = [table[n].view(torch.float64)[:5].tolist() for n in (0, 4)]
    return answers == [0, 0, 1, 2, UNSUPPORTED, 3, 4] and statistics == [
        [-2.0, 4.0, 3.0, 21.0, 4.0],
        [1.0, 2.0, 3.0, 5.0, 2.0],
    ]


def kernel_addresses() -> tuple[int, int, int]:
    """Addresses of the kernel functions for contiguous tensors, for strided tensors, and by a plan."""
    found = kernel()
    if found is None:
        raise BuildError("no kernel")
    work: tuple[Any, ...] = (found.stats, found.strided, found.measure)
    stats, strided, measure = (ctypes.cast(one, ctypes.c_void_p).value or 0 for one in work)
    return stats, strided, measure
