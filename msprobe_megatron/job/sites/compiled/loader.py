"""The compiled look at a tensor: built for the running torch and Python, checked, once a process.

Needs the headers of both, which torch's wheel and most Pythons bring along. Where they are missing, or anything else
goes wrong, `measure.once` does the same in Python.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
import sysconfig
from pathlib import Path
from typing import Any

from msprobe_megatron.native.build import BuildError, Recipe, built
from msprobe_megatron.native.levels import PLAIN
from msprobe_megatron.native.library import FLOAT32, kernel

NO_ROOM, NOT_MINE = -2, -3
"""What `Look.see` says instead of a slot, as in look.cpp."""
_NAME = "msprobe_look"
_PARTS = ("look_tensors.h", "look_rows.h", "look_hooks.h", "look_nodes.h", "look_calls.h")


class _State:
    """What became of the one attempt of this process."""

    asked = False
    module: Any = None
    reason = "not asked for"


def look() -> Any | None:
    """The module with `Counter`, `Eye`, `Look`, `Pen`, `Watch`, `Hook` and `Calls`, if `load_look` has found one."""
    return _State.module


def why_no_look() -> str:
    """Why there is none; empty if there is one."""
    return _State.reason


def load_look(timeout: float = 120.0) -> Any | None:
    """Find or build the module, once a process; None, with a reason in `why_no_look`, where that is impossible.

    Example::

        load_look() is None      # then tensors are looked at from Python
    """
    if not _State.asked:
        _State.asked = True
        try:
            _State.module, _State.reason = _attempt(timeout), ""
        except (BuildError, OSError, ImportError, AttributeError, RuntimeError) as error:
            _State.reason = str(error)
    return _State.module


def _attempt(timeout: float) -> Any:
    if os.environ.get("MSPROBE_NATIVE", "1") == "0" or kernel() is None:
        raise BuildError("no kernel to look with")
    path = _built(timeout)
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(path))
    spec = importlib.util.spec_from_file_location(_NAME, str(path), loader=loader)
    if spec is None:
        raise ImportError(f"{path}: cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    if not _tells_the_truth(module):
        raise BuildError(f"{path}: wrong answers")
    return module


def _built(timeout: float) -> Path:
    """Headers of new releases of torch want C++20, compilers of old machines know C++17 at most."""
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
    # Versions are among the flags so that another torch or Python means another library.
    flags = (
        *(f"-std={standard}", "-O2", "-shared", "-fPIC", "-w", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"),
        "-DAT_PER_OPERATOR_HEADERS",  # not those of every operator, which take seconds to read
        *(f"-DTORCH={torch.__version__}", f"-DPYTHON={sysconfig.get_config_var('SOABI')}"),
        *(f"-I{root / 'include'}", f"-I{python}"),
    )
    libraries = (f"-L{root / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10")
    return Recipe("look", Path(__file__).with_name("look.cpp"), flags, libraries, _PARTS)


def _tells_the_truth(module: Any) -> bool:
    import torch

    with torch.inference_mode(False), torch.no_grad():
        x = torch.tensor([1.0, -2.0, 0.0, 4.0])
        table = torch.zeros((5, 9), dtype=torch.int64)
        addresses = [table[n].data_ptr() for n in range(5)]
        kinds = (torch.Tensor, torch.nn.Parameter)
        eye = module.Eye(
            module.Counter(), lambda slot: -1, addresses, *kernel_addresses(), *kinds, [(x, FLOAT32, 0)], None
        )
        seen = module.Look(eye)
        answers = [seen.see(x), seen.see(x), seen.see(x.view(2, 2)), seen.see(x[1:]), seen.see(x.to(torch.int32))]
        answers += [seen.see(x.add_(1)), seen.see(x[::2])]
        figures = [table[n].view(torch.float64)[:5].tolist() for n in (0, 4)]
    return answers == [0, 0, 1, 2, NOT_MINE, 3, 4] and figures == [
        [-2.0, 4.0, 3.0, 21.0, 4.0],
        [1.0, 2.0, 3.0, 5.0, 2.0],
    ]


def kernel_addresses() -> tuple[int, int, int]:
    """Where the functions of the kernel that a look calls are: for tensors without gaps, with them, by a plan.

    Example: ``Eye(counter, grow, addresses, *kernel_addresses(), …)``.
    """
    found = kernel()
    if found is None:
        raise BuildError("no kernel")
    work: tuple[Any, ...] = (found.stats, found.strided, found.measure)
    stats, strided, measure = (ctypes.cast(one, ctypes.c_void_p).value or 0 for one in work)
    return stats, strided, measure
