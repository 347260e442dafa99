"""Builds the extension once for each user, torch and compiler, into the same private cache as the kernel."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from msprobe_megatron.job.measure.native.build import BuildError, Recipe, built
from msprobe_megatron.job.measure.native.levels import PLAIN

NAME = "msprobe_simulated_device"
SOURCES = Path(__file__).parent / "extension"


def load(timeout: float) -> Any:
    """The compiled module, from the cache or built now; raises `BuildError`, `OSError` or `ImportError`."""
    from torch.utils.backend_registration import rename_privateuse1_backend

    # The device's name has to be there before its first tensor is.
    rename_privateuse1_backend("npu")
    path = str(built(PLAIN, timeout, recipe()))
    extension_loader = importlib.machinery.ExtensionFileLoader(NAME, path)
    spec = importlib.util.spec_from_file_location(NAME, path, loader=extension_loader)
    if spec is None:
        raise ImportError(f"{path}: cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    extension_loader.exec_module(module)
    return module


def recipe() -> Recipe:
    """How the extension is built."""
    import torch

    root, python = Path(torch.__file__).parent, sysconfig.get_paths()["include"]
    if not (Path(python) / "Python.h").is_file():
        raise BuildError(f"{python}: no Python.h")
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    flags = (
        "-std=c++20",
        "-O1",  # the kernels are torch's; what is compiled here only leads to them
        "-shared",
        "-fPIC",
        "-w",
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        "-DAT_PER_OPERATOR_HEADERS",
        # Among the flags so that another torch or Python means another library.
        f"-DTORCH={torch.__version__}",
        f"-DPYTHON={sysconfig.get_config_var('SOABI')}",
        f"-I{root / 'include'}",
        f"-I{root / 'include/torch/csrc/api/include'}",
        f"-I{python}",
    )
    libraries = (f"-L{root / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10")
    parts = tuple(sorted(path.name for path in SOURCES.glob("*.h")))
    return Recipe("simulated_device", SOURCES / "device.cpp", flags, libraries, parts)
