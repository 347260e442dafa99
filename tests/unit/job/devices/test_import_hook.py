"""Megatron modules are repaired on import, whoever else hooks into imports, and the fake triton goes away."""

import importlib
import importlib.abc
import subprocess
import sys
import sysconfig
import types

import pytest
import torch

from msprobe_megatron.job.devices.megatron_on_cpu import fake_triton, import_hook, megatron_fixes

PACKAGE = {
    "__init__.py": "",
    "plain.py": "value = 1\n",
    "fixed.py": "value = 1\n",
    "kernels.py": """import triton
import triton.language as tl

class Kernel(triton.runtime.KernelInterface):
    pass

@triton.jit
def add(x, size: tl.constexpr):
    return x + size

@triton.autotune(configs=[triton.Config({"n": 1}, num_warps=4)], key=["n"])
@triton.jit
def tuned(x):
    return -x
""",
    "guarded.py": "try:\n    import triton\nexcept ImportError:\n    triton = None\n",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package megatron.sample and a finder of its own that repairs one of its modules."""
    folder = tmp_path / "sample"
    folder.mkdir()
    for name, source in PACKAGE.items():
        (folder / name).write_text(source)
    import megatron.core

    parent = sys.modules["megatron"]
    monkeypatch.setattr(parent, "__path__", [*parent.__path__, str(tmp_path)])
    before = set(sys.modules)
    finder = import_hook._Finder({"megatron.sample.fixed": lambda module: setattr(module, "value", 2)})
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]
    assert megatron.core


class _AsksEveryone(importlib.abc.MetaPathFinder):
    """Another tool's hook: wraps whatever the other finders find."""

    def __init__(self):
        self.wrapped = []

    def find_spec(self, fullname, path, target=None):
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                self.wrapped.append(fullname)
                return spec
        return None


@pytest.mark.parametrize("other", [None, 0, 1], ids=["alone", "other_in_front", "other_behind"])
def test_fixed_after_its_own_code_ran(package, monkeypatch, other):
    hook = _AsksEveryone()
    if other is not None:
        sys.meta_path.insert(other, hook)
    fixed = importlib.import_module("megatron.sample.fixed")
    assert fixed.value == 2
    assert importlib.import_module("megatron.sample.plain").value == 1
    assert fixed.__loader__.get_source("megatron.sample.fixed") == PACKAGE["fixed.py"]
    assert hook.wrapped.count("megatron.sample.fixed") == (0 if other is None else 1)


def test_a_module_that_is_not_there_stays_missing(package):
    with pytest.raises(ModuleNotFoundError, match=r"megatron\.sample\.nothing"):
        importlib.import_module("megatron.sample.nothing")


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="the real triton is installed")
def test_triton_is_faked_only_where_its_import_is_not_guarded(package):
    kernels = importlib.import_module("megatron.sample.kernels")
    assert kernels.add(1, 2) == 3
    assert isinstance(kernels.Kernel(), kernels.Kernel)
    assert importlib.import_module("megatron.sample.guarded").triton is None
    assert not [name for name in sys.modules if name.partition(".")[0] == "triton"]


def test_fake_triton_gives_back_what_was_there(monkeypatch):
    real = types.ModuleType("triton")
    monkeypatch.setitem(sys.modules, "triton", real)
    with fake_triton.present():
        assert sys.modules["triton"] is not real
    assert sys.modules["triton"] is real


def test_every_fix_leaves_alone_what_it_does_not_find():
    """Forks and other releases lack some of the names; those fixes that need one say so at once."""
    needs_a_name = []
    for name, fix in megatron_fixes.FIXES.items():
        try:
            fix(types.ModuleType(name))
        except AttributeError:
            needs_a_name.append(name)
    assert needs_a_name == [
        "megatron.core.datasets.utils",
        "megatron.core.fusions.fused_softmax",
        "megatron.core.transformer.dot_product_attention",
        "megatron.training.initialize",
    ]


def _training_initialize():
    module = types.ModuleType("megatron.training.initialize")
    module.initialize_megatron = lambda *args, allow_no_cuda=False: (args, allow_no_cuda)
    module.set_jit_fusion_options = lambda: pytest.fail("fusions must not be warmed up")
    return module


def test_training_starts_without_cuda():
    module = _training_initialize()
    megatron_fixes.FIXES["megatron.training.initialize"](module)
    assert module.initialize_megatron("extra", allow_no_cuda=False) == (("extra",), True)
    module.set_jit_fusion_options()


def test_data_helpers_are_compiled_for_this_interpreter(monkeypatch, tmp_path):
    module = types.ModuleType("megatron.core.datasets.utils")
    module.__file__ = str(tmp_path / "utils.py")
    module.compile_helpers = lambda: pytest.fail("the suffix would be that of another Python")
    calls = []
    monkeypatch.setattr(subprocess, "run", lambda command, **options: calls.append((command, options["check"])))
    there = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if there else None)
    megatron_fixes.FIXES["megatron.core.datasets.utils"](module)
    module.compile_helpers()
    assert calls == [(["make", "-C", str(tmp_path), f"LIBEXT={sysconfig.get_config_var('EXT_SUFFIX')}"], True)]
    there.append(True)
    module.compile_helpers()
    assert len(calls) == 1


class _Config:
    sequence_parallel = True
    layernorm_zero_centered_gamma = persist_layer_norm = memory_efficient_layer_norm = False
    normalization = "LayerNorm"


def test_norm_parameters_are_marked_for_sequence_parallelism():
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    config = _Config()
    norm = WrappedTorchNorm(config, 4)
    assert [parameter.sequence_parallel for parameter in norm.parameters()] == [True, True]
    assert config.sequence_parallel


def test_fused_softmax_kernels_are_never_asked_for():
    from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.utils import attention_mask_func

    softmax = FusedScaleMaskSoftmax(False, True, AttnMaskType.causal, True, attention_mask_func, True, None)
    scores = torch.zeros(1, 4, 32, 32, dtype=torch.bfloat16)
    probabilities = softmax(scores, None)[0, 0].double()
    expected = torch.tril(torch.ones(32, 32)) / torch.arange(1, 33)[:, None]
    torch.testing.assert_close(probabilities, expected.double(), rtol=1e-2, atol=0)
