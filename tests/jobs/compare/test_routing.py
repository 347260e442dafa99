"""Experts in bf16: clean layouts agree although tokens on the edge go elsewhere, and a wrong router is still found."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from msprobe_megatron.analysis.compare import compare as module
from msprobe_megatron.analysis.compare.compare import Comparison, compare
from msprobe_megatron.analysis.compare.routing import Routing
from msprobe_megatron.analysis.load.run import open_run
from tests.jobs.distributed.layouts import flags_of
from tests.support.forked import run_forked

_MOE = "--num-experts 4 --moe-router-topk 2 --disable-bias-linear"
_WRONG = "decoder.layers.1.mlp.router"
LAYOUTS = {
    "one": (1, ""),
    "ep2": (2, "--expert-model-parallel-size 2"),
    # Not with ETP1 and EP1: Megatron 0.16.1 does not reduce the gradients of experts over TP ranks there.
    "tp2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "tp2_ep2": (
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2"
        " --expert-tensor-parallel-size 1",
    ),
    "dp2": (2, ""),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "mbs1": (1, "--micro-batch-size 1"),
}


def _limited(router: Any) -> None:
    """Scores by sigmoid in float32, a bias for each expert, one of two groups: as DeepSeek-V3 routes."""
    router.score_function = "sigmoid"
    router.expert_bias = torch.tensor([0.03, -0.02, 0.01, -0.03])
    router.config.moe_router_num_groups, router.config.moe_router_group_topk = 2, 1
    router.config.moe_router_dtype = "fp32"


def _bias(router: Any) -> None:
    router.expert_bias = router.expert_bias + torch.tensor([0.0, 0.0, 0.05, 0.0])


def _groups(router: Any) -> None:
    _own_config(router, moe_router_num_groups=None, moe_router_group_topk=None)


def _normalisation(router: Any) -> None:
    """Probabilities that are not normalised over the chosen experts: softmax over all of them."""
    _own_config(router, moe_router_pre_softmax=True)


def _swap(router: Any) -> None:
    router.score_function = "softmax"


def _bf16(router: Any) -> None:
    original = router.gating

    @functools.wraps(original)
    def gating(*args: Any, **kwargs: Any) -> torch.Tensor:
        logits: torch.Tensor = original(*args, **kwargs)
        return logits.bfloat16().float()

    router.gating = gating


def _own_config(router: Any, **changes: Any) -> None:
    import copy

    router.config = copy.copy(router.config)
    for name, value in changes.items():
        setattr(router.config, name, value)


def _nothing(router: Any) -> None:
    return None


SETTINGS: dict[str, Callable[[Any], None]] = {"plain": _nothing, "limited": _limited}
FAULTS: dict[str, Callable[[Any], None]] = {
    "none": _nothing,
    "bias": _bias,
    "groups": _groups,
    "normalisation": _normalisation,
    "swap": _swap,
    "bf16": _bf16,
}


def train(argv: list[str], settings: str, fault: str) -> list[float]:
    """Train in this rank with routers of these settings, one of them wrong."""
    from msprobe_megatron.lab.demo.pretrain_gpt import run
    from msprobe_megatron.lab.demo.train import Callbacks
    from msprobe_megatron.topology import names

    def ready(chunks: list[Any], optimizer: Any) -> None:
        for chunk in chunks:
            for entry in names.modules(chunk):
                if entry.name.endswith(".router"):
                    SETTINGS[settings](entry.module)
        for chunk in chunks:
            for entry in names.modules(chunk):
                if entry.name == _WRONG:
                    FAULTS[fault](entry.module)

    return run(argv, Callbacks(ready=ready)).losses


class Runs:
    """Run directories, each trained once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        (root / "statistics.yaml").write_text("steps: [0, 2]\ndump: {level: L0}\n")
        (root / "sketches.yaml").write_text("steps: [0, 2]\ndump: {level: L0, digest: true, sketch: 256}\n")

    def __call__(
        self,
        layout: str,
        settings: str = "plain",
        fault: str = "none",
        *,
        flags: str = "--bf16 --moe-token-dispatcher-type alltoall",
        seed: int = 7,
        probe: str = "statistics",
    ) -> Path:
        out = self._root / "_".join((layout, settings, fault, flags.replace(" ", ""), str(seed), probe))
        if not out.exists():
            world, own = LAYOUTS[layout]
            argv = [*flags_of("single", dropout=False), *f"{_MOE} {flags} {own}".split(), "--seed", str(seed)]
            argv += ["--msprobe-config", str(self._root / f"{probe}.yaml"), "--msprobe-output", str(out)]
            run_forked(world, train, argv, settings, fault)
        return out


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("routing"))


def _compared(left: Path, right: Path, step: int | None = None) -> Comparison:
    return compare(open_run(left), open_run(right), step)


def _agrees(result: Comparison) -> None:
    assert (result.verdict, result.reason) == ("agree", ""), result.first_divergence
    assert result.counts["agree"] > 2000


@pytest.mark.parametrize("layout", ["ep2", "tp2_ep2"])
def test_clean_experts_in_bf16_agree_although_tokens_are_routed_otherwise(trained, layout):
    result = _compared(trained("one"), trained(layout))
    _agrees(result)
    assert any("tokens routed otherwise, all within rounding of the edge" in text for text in result.hints)
    assert any("room for tokens routed otherwise" in text for text in result.hints)


def test_without_the_choices_of_routers_nothing_behind_them_can_be_judged(trained, monkeypatch, tmp_path):
    """The monitor has none: tensors behind experts that got a token more or fewer are listed, and all before agree."""
    monkeypatch.setattr(module, "compare_routing", lambda *args: Routing([], 1.0))
    result = _compared(trained("one"), trained("tp2_ep2"))
    assert (result.verdict, result.first_divergence) == ("agree", None)
    reason = "behind experts that got other tokens, and no choices of routers were recorded"
    assert result.layout[reason] > 500
    rows = result.table.to_pylist()
    assert {row["state"] for row in rows if row["name"].startswith("decoder.layers.0.self_attention")} >= {"agree"}
    assert any("were not judged" in text for text in result.hints)
    # A difference before the first router is found all the same.
    wrong = _with_a_wrong_projection(trained("tp2_ep2"), tmp_path / "wrong")
    found = _compared(trained("one"), wrong)
    assert found.verdict == "diverged"
    assert found.first_divergence.name == "decoder.layers.0.self_attention.linear_proj", found.first_divergence
    monkeypatch.setattr(module, "unrecorded", lambda pairs, *args: np.zeros(len(pairs), bool))
    assert _compared(trained("one"), trained("tp2_ep2")).verdict == "diverged"


def _with_a_wrong_projection(run, folder):
    """A copy of a run in which the output of the first attention is half as large again."""
    shutil.copytree(run, folder)
    for file in folder.glob("step_*/rank_*/records.parquet"):
        table = pq.read_table(file)
        names, kinds, sides = (table.column(name).to_pylist() for name in ("name", "kind", "io"))
        hit = [
            (name, kind, io) == ("decoder.layers.0.self_attention.linear_proj", "activation", "output")
            for name, kind, io in zip(names, kinds, sides, strict=True)
        ]
        for column, factor in {"min": 1.5, "max": 1.5, "sum": 1.5, "absmax": 1.5, "sumsq": 2.25}.items():
            values = table.column(column).to_pylist()
            changed = [v * factor if h and v is not None else v for v, h in zip(values, hit, strict=True)]
            field = table.schema.field(column)
            table = table.set_column(table.schema.get_field_index(column), field, pa.array(changed).cast(field.type))
        pq.write_table(table, file)
    return folder


def test_nothing_is_allowed_before_a_token_is_routed_otherwise(trained):
    """Step 0 of these two routes alike: its tolerances are those of rounding."""
    result = _compared(trained("one"), trained("ep2"), 0)
    assert (result.verdict, result.hints) == ("agree", [])
    assert max(result.table.column("tolerance").to_pylist()) < 0.5


@pytest.mark.parametrize("fault", ["bias", "bf16"])
def test_a_wrong_router_is_found_at_the_router(trained, fault):
    _is_found(_compared(trained("one", "limited"), trained("ep2", "limited", fault)), fault)


def _is_found(result: Comparison, fault: str) -> None:
    assert result.verdict == "diverged", fault
    assert result.first_divergence is not None
    assert (result.first_divergence.module, result.first_divergence.io) == (_WRONG, "output"), fault
    what = {"bias": "too far from the edge for rounding", "bf16": "precision of bfloat16 in the second run only"}
    assert what.get(fault, "") in result.first_divergence.what


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["bias", "bf16", "groups", "swap"])
@pytest.mark.parametrize("layout", ["one", "tp2", "pp2"])
def test_a_wrong_router_is_found_in_every_layout(trained, fault, layout):
    _is_found(_compared(trained("one", "limited"), trained(layout, "limited", fault)), fault)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one", "tp2", "pp2"])
def test_a_wrong_normalisation_is_found_at_the_router(trained, layout):
    _is_found(_compared(trained("one"), trained(layout, "plain", "normalisation")), "normalisation")


@pytest.mark.slow
@pytest.mark.parametrize("probe", ["statistics", "sketches"])
@pytest.mark.parametrize("seed", [7, 11, 23])
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("layout", ["ep2", "tp2", "tp2_ep2", "dp2", "pp2", "mbs1"])
def test_clean_experts_agree_in_every_layout(trained, layout, dispatcher, seed, probe):
    flags = f"--bf16 --moe-token-dispatcher-type {dispatcher}"
    golden, other = (trained(name, flags=flags, seed=seed, probe=probe) for name in ("one", layout))
    _agrees(_compared(golden, other))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ep2", "tp2_ep2", "pp2"])
@pytest.mark.parametrize("settings", ["plain", "limited"])
def test_clean_experts_agree_with_other_settings(trained, layout, settings):
    for flags in ("--bf16 --moe-token-dispatcher-type alltoall", "--moe-token-dispatcher-type alltoall"):
        _agrees(_compared(trained("one", settings, flags=flags), trained(layout, settings, flags=flags)))
