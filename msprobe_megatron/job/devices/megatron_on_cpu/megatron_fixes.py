"""What has to be changed inside Megatron modules, one function a module, each with its reason. Capabilities
are probed, versions are not: every fix leaves alone what it does not find.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import context_parallel
from .substitute import constant


def _torch_norm(module: ModuleType) -> None:
    """Let torch's norms take sequence parallelism: only the mark for the gradients' all-reduce is missing."""
    for name in ("WrappedTorchNorm", "WrappedTorchLayerNorm"):
        cls = module.__dict__.get(name)
        if cls is None:
            continue
        build = cls.__new__ if "__new__" in cls.__dict__ else cls.__init__
        setattr(cls, build.__name__, _norm_with_sequence_parallel(build))


def _norm_with_sequence_parallel(build: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(build)
    def wrapped(cls_or_self: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        asked, config.sequence_parallel = config.sequence_parallel, False
        try:
            built = build(cls_or_self, config, *args, **kwargs)
        finally:
            config.sequence_parallel = asked
        norm = cls_or_self if built is None else built
        for parameter in norm.parameters():
            parameter.sequence_parallel = asked
        return built

    return wrapped


def _fused_softmax(module: ModuleType) -> None:
    """Never ask whether the fused kernels suit: the question itself imports a CUDA extension."""
    module.FusedScaleMaskSoftmax.is_kernel_available = constant(False)


def _moe_utils(module: ModuleType) -> None:
    """Bind a name 0.16 forgets: it is bound with TransformerEngine only, but tested for None without."""
    module.__dict__.setdefault("te_general_gemm", None)


def _layer_specs(module: ModuleType) -> None:
    """Let the local MoE spec of 0.10, 0.11 name grouped linears that exist only with TransformerEngine."""
    for name in ("TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"):
        module.__dict__.setdefault(name, None)
    build = module.__dict__.get("_get_moe_module_spec")
    if build is not None and "TEColumnParallelLinear" not in module.__dict__:

        @functools.wraps(build)
        def without_te(*args: Any, **kwargs: Any) -> Any:
            return build(*args, **{**kwargs, "use_te": False})

        module.__dict__["_get_moe_module_spec"] = without_te


def _fp8_utils(module: ModuleType) -> None:
    """Let the distributed optimizer of 0.12 quantise its empty list of fp8 parameters without TE."""
    quantize = module.__dict__.get("_quantize_param_shard_impl")
    if quantize is not None:

        @functools.wraps(quantize)
        def unless_empty(model_params: Any, *args: Any, **kwargs: Any) -> Any:
            return quantize(model_params, *args, **kwargs) if len(model_params) else None

        module.__dict__["_quantize_param_shard_impl"] = unless_empty


def _initialize(module: ModuleType) -> None:
    """Skip the assertion that CUDA is there, and the warming up of fusions that are none here."""
    initialize: Callable[..., Any] = module.initialize_megatron

    @functools.wraps(initialize)
    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        kwargs["allow_no_cuda"] = True
        return initialize(*args, **kwargs)

    module.__dict__["initialize_megatron"] = initialize_megatron
    module.__dict__["set_jit_fusion_options"] = constant(None)


def _fused_kernels(module: ModuleType) -> None:
    """Do not build them: it takes nvcc."""
    module.__dict__["load"] = constant(None)


def _datasets_utils(module: ModuleType) -> None:
    """Compile the data helpers for the running interpreter, and only if it has none.

    Megatron's Makefile takes the suffix of whatever `python3-config` comes first in PATH; a virtual
    environment has none, and the library made for another Python cannot be loaded.
    """
    folder = os.path.dirname(str(module.__file__))

    @functools.wraps(module.compile_helpers)
    def compile_helpers() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
            return
        path = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        subprocess.run(["make", "-C", folder, f"LIBEXT={suffix}"], env={**os.environ, "PATH": path}, check=True)
        importlib.invalidate_caches()

    module.__dict__["compile_helpers"] = compile_helpers


FIXES: dict[str, Callable[[ModuleType], None]] = {
    "megatron.core.datasets.utils": _datasets_utils,
    "megatron.core.fp8_utils": _fp8_utils,
    "megatron.core.fusions.fused_softmax": _fused_softmax,
    "megatron.core.models.gpt.gpt_layer_specs": _layer_specs,
    "megatron.core.models.gpt.moe_module_specs": _layer_specs,
    "megatron.core.transformer.dot_product_attention": context_parallel.fix,
    "megatron.core.transformer.moe.moe_utils": _moe_utils,
    "megatron.core.transformer.torch_layer_norm": _torch_norm,
    "megatron.core.transformer.torch_norm": _torch_norm,
    "megatron.legacy.fused_kernels": _fused_kernels,
    "megatron.training.initialize": _initialize,
}
