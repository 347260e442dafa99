"""What has to be changed inside Megatron modules, one function a module, each with its reason. Capabilities
are probed, versions are not: every fix leaves alone what it does not find.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from types import ModuleType
from typing import Any

from msprobe_megatron.job.devices.megatron_on_cpu import attention
from msprobe_megatron.job.devices.megatron_on_cpu.substitute import constant


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
    """Never check whether the fused kernels apply: the check itself imports a CUDA extension."""
    module.FusedScaleMaskSoftmax.is_kernel_available = constant(False)


def _moe_utils(module: ModuleType) -> None:
    """Define a name that 0.16 defines with TransformerEngine only, but compares to None without it."""
    module.__dict__.setdefault("te_general_gemm", None)


def _recompute(module: ModuleType) -> None:
    """Answer that fp8 is off: 0.16 asks TransformerEngine when it checkpoints without output, also without it."""

    class FP8GlobalStateManager:
        is_fp8_enabled = staticmethod(constant(False))

    if hasattr(module, "CheckpointWithoutOutput"):
        module.__dict__.setdefault("FP8GlobalStateManager", FP8GlobalStateManager)
        for name in ("activation_recompute_forward", "fp8_autocast"):
            module.__dict__.setdefault(name, lambda *args, **kwargs: contextlib.nullcontext())


def _latent_attention(module: ModuleType) -> None:
    """Tell multi-latent attention of 0.16 that TransformerEngine is missing: its classes are mocks then."""
    if not isinstance(module.__dict__.get("TELinear"), type):
        module.__dict__["HAVE_TE"] = False


def _mlp(module: ModuleType) -> None:
    """Let experts have biases: 0.16 adds them in place to what torch then takes for a view of a custom function."""
    if not hasattr(module, "MLP"):
        return
    build = module.MLP.__init__

    @functools.wraps(build)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        linear: Any = getattr(self, "linear_fc2", None)
        if getattr(linear, "is_expert", False) and getattr(linear, "bias", None) is not None:
            linear.forward = _with_own_output(linear.forward)

    module.MLP.__init__ = __init__


def _with_own_output(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        output, bias = forward(*args, **kwargs)
        return output.clone(), bias

    return wrapped


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
    """Skip the assertion that CUDA is available, and the warm-up of fusions that do not exist here."""
    initialize: Callable[..., Any] = module.initialize_megatron

    @functools.wraps(initialize)
    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        kwargs["allow_no_cuda"] = True
        return initialize(*args, **kwargs)

    module.__dict__["initialize_megatron"] = initialize_megatron
    module.__dict__["set_jit_fusion_options"] = constant(None)


def _fused_kernels(module: ModuleType) -> None:
    """Do not build them: that needs nvcc."""
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
    "megatron.core.tensor_parallel.random": _recompute,
    "megatron.core.transformer.dot_product_attention": attention.fix,
    "megatron.core.transformer.mlp": _mlp,
    "megatron.core.transformer.moe.moe_utils": _moe_utils,
    "megatron.core.transformer.multi_latent_attention": _latent_attention,
    "megatron.core.transformer.torch_layer_norm": _torch_norm,
    "megatron.core.transformer.torch_norm": _torch_norm,
    "megatron.legacy.fused_kernels": _fused_kernels,
    "megatron.training.initialize": _initialize,
}
