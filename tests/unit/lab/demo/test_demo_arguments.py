"""Bad flags: one line in Megatron's manner, on rank 0, exit code 2, before anything heavy is imported."""

from __future__ import annotations

import shlex

import pytest

from msprobe_megatron.lab.demo.arguments import build_parser, parse
from tests.unit.lab.demo.small_job import BASE

TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
VPP2 = f"{PP2} --num-layers-per-virtual-pipeline-stage 1"
MOE = "--num-experts 4 --disable-bias-linear"
FULL = "--recompute-granularity full --recompute-method uniform"

REFUSED = [
    (1, "--num-layers x", "--num-layers: invalid int value: 'x'"),
    (1, "--num-layers 0", "--num-layers: 0 is not positive"),
    (1, "--no-such-flag", "unrecognized arguments: --no-such-flag"),
    (1, "--hidden 3", "unrecognized arguments: --hidden 3"),
    (1, "--normalization BatchNorm", "--normalization: invalid choice: 'BatchNorm'"),
    (1, "--attention-dropout 1", "--attention-dropout: 1.0"),
    (1, "--clip-grad -1", "--clip-grad: -1.0 is negative"),
    (1, "--lr nan", "--lr: nan is not positive"),
    (3, TP2, "world size (3) is not divisible by total model size (2 = --tensor-model-parallel-size 2"),
    (4, f"{TP2} {PP2} --context-parallel-size 2", "world size (4) is not divisible by total model size (8"),
    (1, "--hidden-size 30", "--hidden-size (30) is not divisible by --num-attention-heads (4)"),
    (3, "--tensor-model-parallel-size 3", "--num-attention-heads (4) is not divisible by"),
    (1, "--num-query-groups 3", "--num-attention-heads (4) is not divisible by --num-query-groups (3)"),
    (2, f"{TP2} --num-query-groups 1", "--num-query-groups (1) is not divisible by --tensor-model"),
    (2, f"{TP2} --ffn-hidden-size 63", "--ffn-hidden-size (63) is not divisible by --tensor-model"),
    (1, "--max-position-embeddings 8", "--max-position-embeddings (8) is less than --seq-length (16)"),
    (2, "--context-parallel-size 2 --seq-length 18", "--seq-length (18) is not divisible by 2 x"),
    (2, f"{TP2} --sequence-parallel --seq-length 15", "--sequence-parallel: --seq-length over"),
    (1, "--position-embedding-type rope --kv-channels 7", "the size of a head (7) is odd"),
    (1, "--swiglu --squared-relu", "--swiglu and --squared-relu exclude each other"),
    (
        2,
        f"{PP2} --num-layers 3",
        "--num-layers (3): not divisible by 2 of --pipeline-model-parallel-size (2)",
    ),
    (2, f"{PP2} --decoder-first-pipeline-num-layers 4", "the 0 of --num-layers (4) left by"),
    (
        1,
        "--decoder-last-pipeline-num-layers 1",
        "--decoder-last-pipeline-num-layers 1 needs --pipeline-model",
    ),
    (
        2,
        f"{PP2} --num-layers-per-virtual-pipeline-stage 3",
        "layers of a pipeline stage (2) are not divisible",
    ),
    (2, f"{PP2} --num-virtual-stages-per-pipeline-rank 4", "(2) are not divisible by its virtual stages (4)"),
    (2, f"{VPP2} --num-virtual-stages-per-pipeline-rank 2", "exclude each other"),
    (2, f"{VPP2} --decoder-first-pipeline-num-layers 1", "cannot describe uneven stages"),
    (
        1,
        "--num-layers-per-virtual-pipeline-stage 1",
        "need --pipeline-model-parallel-size of at least 2, not 1",
    ),
    (2, f"{VPP2} --no-overlap-p2p-communication", "size of at least 3, not 2"),
    (2, f"{VPP2} --global-batch-size 6", "number of microbatches (3) is not divisible by"),
    (
        1,
        "--global-batch-size 7",
        "--global-batch-size (7) is not divisible by --micro-batch-size (2) times data",
    ),
    (4, "--global-batch-size 4", "times data parallel size (4)"),
    (2, "--expert-model-parallel-size 2", "--expert-model-parallel-size 2 needs --num-experts"),
    (1, "--expert-tensor-parallel-size 1", "--expert-tensor-parallel-size 1 needs --num-experts"),
    (3, f"{MOE} --expert-model-parallel-size 3", "--num-experts (4) is not divisible by --expert-model"),
    (2, f"{MOE} --expert-model-parallel-size 4", "world size (2) is not divisible by 4 = --expert-tensor"),
    (1, f"{MOE} --moe-router-topk 5", "--moe-router-topk (5) exceeds --num-experts (4)"),
    (2, f"{MOE} {TP2}", "--num-experts 4 needs --sequence-parallel with --tensor-model-parallel-size 2"),
    (1, "--num-experts 4", "--num-experts 4 needs --disable-bias-linear"),
    (1, "--fp16 --bf16", "--fp16 and --bf16 exclude each other"),
    (1, "--loss-scale 8", "--loss-scale 8.0 needs --fp16"),
    (1, "--overlap-param-gather", "--overlap-param-gather needs --use-distributed-optimizer"),
    (1, "--overlap-param-gather --use-distributed-optimizer", "needs --overlap-grad-reduce"),
    (1, "--recompute-granularity full", "--recompute-granularity full needs --recompute-method"),
    (1, "--recompute-method block", "--recompute-method block needs --recompute-granularity full"),
    (1, f"{FULL} --recompute-activations", "--recompute-activations and --recompute-granularity full"),
    (1, f"{FULL} --recompute-num-layers 3", "the 4 layers of a (virtual) pipeline stage are not divisible"),
    (1, f"{FULL} --recompute-num-layers 5", "--recompute-num-layers (5) exceeds --num-layers (4)"),
    (
        1,
        f"{FULL} --recompute-modules mlp",
        "--recompute-modules ['mlp'] needs --recompute-granularity selective",
    ),
    (1, "--recompute-activations --recompute-modules mlp", "mlp needs --disable-bias-linear"),
    (1, f"{FULL} --distribute-saved-activations", "needs --tensor-model-parallel-size above 1"),
    (1, "--msprobe-device tpu", "--msprobe-device: invalid choice: 'tpu'"),
]


@pytest.mark.parametrize(("world_size", "flags", "line"), REFUSED)
def test_refused(
    world_size: int,
    flags: str,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as leaving:
        parse([*BASE, *shlex.split(flags)])
    assert leaving.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("pretrain_gpt.py: error: ")
    assert line in err


def test_only_rank_zero_speaks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(SystemExit) as leaving:
        parse(["--num-layers", "x"])
    assert leaving.value.code == 2
    assert capsys.readouterr() == ("", "")


def test_sizes_must_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([])
    err = capsys.readouterr().err
    for name in ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--train-iters"):
        assert name in err


def test_derived_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    args = parse([*BASE, *VPP2.split(), *TP2.split(), "--vocab-size", "100"])
    assert args.data_parallel_size == 2
    assert args.num_microbatches == 2
    assert args.virtual_pipeline_model_parallel_size == 2
    assert args.overlap_p2p_comm
    assert args.padded_vocab_size == 104  # next multiple of 8, which TP 2 divides
    assert (args.kv_channels, args.ffn_hidden_size, args.num_query_groups) == (8, 128, 4)


def test_defaults_are_megatrons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    required = "--num-layers 2 --hidden-size 48 --num-attention-heads 2 --seq-length 8 --train-iters 1 "
    required += "--micro-batch-size 3"
    args = parse([*required.split(), "--swiglu", "--sequence-parallel", "--bf16"])
    assert (args.attention_dropout, args.hidden_dropout, args.init_method_std) == (0.1, 0.1, 0.02)
    assert (args.clip_grad, args.weight_decay, args.adam_beta2, args.seed) == (1.0, 0.01, 0.999, 1234)
    assert (args.normalization, args.position_embedding_type) == ("LayerNorm", "learned_absolute")
    assert (args.initial_loss_scale, args.log_interval, args.moe_router_topk) == (2.0**32, 100, 2)
    assert args.ffn_hidden_size == 128  # 4 * 48 * 2/3 in steps of 64
    assert args.global_batch_size == 3
    assert args.accumulate_allreduce_grads_in_fp32
    assert not args.sequence_parallel, "one rank has no sequence to share"
    assert not args.overlap_p2p_comm


def test_help_lists_the_kits_flags_and_an_example() -> None:
    text = build_parser().format_help()
    for name in ("config", "output", "device", "steps", "strict"):
        assert f"--msprobe-{name}" in text
    assert "torchrun" in text


def test_flags_of_megatrons_own_script_are_accepted() -> None:
    flags = "--mock-data --tokenizer-type NullTokenizer --split 99,1,0 --transformer-impl local --num-workers 0 "
    flags += "--distributed-backend gloo --no-persist-layer-norm --use-cpu-initialization --eval-iters 0"
    assert parse([*BASE, *flags.split()]).transformer_impl == "local"
