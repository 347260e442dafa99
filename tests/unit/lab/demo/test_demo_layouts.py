"""One computation, many layouts: losses and gradient norms agree, whatever the job is cut into."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.unit.lab.demo.small_job import train_in

TP = "--tensor-model-parallel-size 2"
SP = f"{TP} --sequence-parallel"
PP = "--pipeline-model-parallel-size 2"
VPP = f"{PP} --num-layers-per-virtual-pipeline-stage 1"
CP = "--context-parallel-size 2"
EP = "--expert-model-parallel-size 2"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000"
FULL = "--recompute-granularity full --recompute-method"

GPT = ""
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights "
    "--disable-bias-linear --num-query-groups 2 --qk-layernorm --add-qkv-bias"
)
MOE = "--num-experts 4 --moe-aux-loss-coeff 0.01 --disable-bias-linear"
GATED_MOE = f"{MOE} --swiglu --moe-ffn-hidden-size 48"

LAYOUTS = [
    (GPT, 2, TP),
    (GPT, 2, SP),
    (GPT, 2, PP),
    (GPT, 2, VPP),
    (GPT, 2, f"{PP} --decoder-first-pipeline-num-layers 1"),
    (GPT, 4, f"{TP} {PP}"),
    (GPT, 2, ""),
    (GPT, 2, OVERLAP),
    (GPT, 2, CP),
    (GPT, 4, f"{SP} {CP}"),
    (GPT, 4, f"{VPP} {OVERLAP}"),
    (GPT, 1, f"{FULL} uniform --recompute-num-layers 2"),
    (GPT, 1, f"{FULL} block"),
    (GPT, 1, "--recompute-granularity selective"),
    (GPT, 2, f"{TP} {FULL} uniform --distribute-saved-activations"),
    (LLAMA, 2, SP),
    (LLAMA, 2, PP),
    (LLAMA, 2, CP),
    (MOE, 2, EP),
    (MOE, 2, f"{EP} --moe-token-dispatcher-type alltoall"),
    (MOE, 2, PP),
    (MOE, 4, f"{SP} {EP}"),
    (GATED_MOE, 4, f"{SP} {EP} --expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall"),
    (GATED_MOE, 2, f"{SP}"),
]


@functools.cache
def alone(model: str) -> dict[str, Any]:
    return train_in(1, model)


@pytest.mark.parametrize(("model", "world_size", "layout"), LAYOUTS)
def test_same_computation_as_one_process(model: str, world_size: int, layout: str) -> None:
    expected, seen = alone(model), train_in(world_size, f"{model} {layout}")
    assert seen["losses"][0] == pytest.approx(expected["losses"][0], rel=1e-6)
    assert seen["grad_norms"][0] == pytest.approx(expected["grad_norms"][0], rel=2e-6)
    assert seen["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert seen["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-4)


def test_gradient_is_that_of_the_mean_over_the_global_batch() -> None:
    """Eight samples at once or one by one: averaging over microbatches must not change the computation."""
    expected = alone(GPT)
    for size in (1, 8):
        seen = train_in(1, f"--micro-batch-size {size}")
        assert seen["losses"] == pytest.approx(expected["losses"], rel=1e-4)
        assert seen["grad_norms"][0] == pytest.approx(expected["grad_norms"][0], rel=2e-6)


@pytest.mark.parametrize("layout", [TP, PP, "--use-distributed-optimizer"])
@pytest.mark.parametrize("precision", ["--bf16", "--fp16 --initial-loss-scale 1024"])
def test_half_precision_stays_near_single_precision(precision: str, layout: str) -> None:
    expected, seen = alone(GPT), train_in(2, f"{precision} {layout}")
    # bf16 keeps 8 bits: errors of a few 1e-3 relative, and it must not be silently fp32.
    assert seen["losses"] == pytest.approx(expected["losses"], rel=5e-3)
    assert seen["losses"] != expected["losses"]


def test_other_seed_is_another_job() -> None:
    assert train_in(1, "--seed 7")["losses"][0] != alone(GPT)["losses"][0]
