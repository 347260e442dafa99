"""Modules of the legacy model, and of hosts that bring a class of the same name with another layout."""

import sys
import types

import pytest
import torch
from torch import nn

from msprobe_megatron.topology.host import framework
from msprobe_megatron.topology.names import NamedModule
from msprobe_megatron.topology.shards_of.activations import ChunkLayout, activation_spec
from msprobe_megatron.topology.shards_of.grad_buffers import buckets, reduced_range


def flash(package):
    cls = type("FlashSelfAttention", (nn.Module,), {"__module__": f"{package}.legacy.model.transformer"})
    return NamedModule("encoder.layers.0.self_attention.core_attention_flash", cls(), None)


@pytest.mark.parametrize(
    ("package", "query", "output", "dims"),
    [
        ("megatron", "b[dp:samples] s[cp:zigzag] n[tp] d", "b[dp:samples] s[cp:zigzag] n[tp] d", 4),
        ("modellink", "s[cp:zigzag] b[dp:samples] n[tp] d", "s[cp:zigzag] b[dp:samples] h[tp]", 3),
        ("mindspeed_llm", "s[cp:zigzag] b[dp:samples] n[tp] d", "s[cp:zigzag] b[dp:samples] h[tp]", 3),
    ],
)
def test_fused_attention_of_a_package_has_that_packages_layout(package, query, output, dims):
    entry, layout = flash(package), ChunkLayout()
    assert str(activation_spec(entry, "input", "q", 4, layout)) == query
    assert str(activation_spec(entry, "output", "", dims, layout)) == output


def test_the_norm_inside_an_embedding():
    parent = type("VocabParallelEmbedding", (nn.Module,), {})()
    entry = NamedModule("embedding.word_embeddings.norm", nn.LayerNorm(2), parent)
    assert str(activation_spec(entry, "input", "input", 3, ChunkLayout())) == "b[dp:samples] s[cp:zigzag] h"


def test_the_version_of_a_release_that_does_not_import_it_itself(monkeypatch, tmp_path):
    """0.6 and 0.7, copied beside the script as ModelLink's installation tells to."""
    folder = tmp_path / "megatron/core"
    folder.mkdir(parents=True)
    (folder / "package_info.py").write_text("__version__ = '0.6.0'\n")
    core = types.ModuleType("megatron.core")
    core.__path__ = [str(folder)]
    megatron = types.ModuleType("megatron")
    megatron.__path__ = [str(folder.parent)]
    monkeypatch.setitem(sys.modules, "megatron", megatron)
    monkeypatch.setitem(sys.modules, "megatron.core", core)
    monkeypatch.delitem(sys.modules, "megatron.core.package_info", raising=False)
    try:
        assert framework.versions()["megatron-core"] == "0.6.0"
    finally:
        sys.modules.pop("megatron.core.package_info", None)


def test_the_range_of_a_rank_in_a_release_without_a_configuration_of_its_ddp(monkeypatch):
    """0.6 keeps what it was told on the wrapper itself: outside its range a rank holds unreduced numbers."""
    parameter = nn.Parameter(torch.zeros(4, 3))
    bucket = types.SimpleNamespace(grad_data=torch.zeros(16), offset=0)
    buffer = types.SimpleNamespace(
        buckets=[bucket], param_index_map={parameter: (2, 14, 0)}, data_parallel_group=object()
    )
    chunk = nn.Module()
    chunk.buffers, chunk.expert_parallel_buffers, chunk.use_distributed_optimizer = [buffer], [], True
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 1)
    # Elements 8 to 16 of the bucket are this rank's, and the parameter begins at 2.
    assert reduced_range(chunk, parameter) == (6, 12)
    ((segment,),) = [found.segments for found in buckets(chunk)]
    assert segment[1:] == (2, 14, (6, 12))
    chunk.use_distributed_optimizer = False
    assert reduced_range(chunk, parameter) is None
    assert buckets(nn.Linear(2, 2)) == []
