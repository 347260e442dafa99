"""`msprobe-megatron ckpt-diff` on checkpoints that small jobs wrote: layouts and formats agree, faults are named."""

import json
import os
import pickle
import shutil
import signal

import numpy as np
import pytest
import torch

from msprobe_megatron.analysis.checkpoints.differ import diff
from msprobe_megatron.analysis.checkpoints.distributed_state import places_of
from msprobe_megatron.analysis.checkpoints.held import CheckpointError
from msprobe_megatron.analysis.checkpoints.opening import open_checkpoint
from msprobe_megatron.analysis.checkpoints.plain_pickle import PickleError, read_pickle
from msprobe_megatron.analysis.checkpoints.safe_load import StandIn, load_file
from msprobe_megatron.cli import main
from tests.jobs.distributed.layouts import LAYOUTS, flags_of
from tests.support.forked import run_forked
from tests.unit.analysis.checkpoints.jobs import train_and_save

_MORE = {
    "distopt": (2, "--use-distributed-optimizer"),
    "distopt_tp2_pp2": (4, f"--use-distributed-optimizer {LAYOUTS['tp2_pp2'].flags}"),
    "distopt_ep2": (2, f"--use-distributed-optimizer {LAYOUTS['ep2'].flags}"),
    "distopt_vpp2": (2, f"--use-distributed-optimizer --bf16 {LAYOUTS['pp2_vpp2'].flags}"),
    "distopt_buckets": (2, LAYOUTS["dp2_distopt"].flags),
    "bf16": (1, "--bf16"),
    "bf16_tp2": (2, f"--bf16 {LAYOUTS['tp2'].flags}"),
}


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Checkpoints after one step, each written once."""
    root = tmp_path_factory.mktemp("checkpoints")

    def of(layout, form):
        path = root / f"{layout}_{form}"
        if not path.exists():
            world, flags = _MORE.get(layout) or (LAYOUTS[layout].world, LAYOUTS[layout].flags)
            argv = [*flags_of("single", dropout=False), *flags.split(), "--train-iters", "1"]
            path.mkdir()
            run_forked(world, train_and_save, argv, str(path), form)
        return path

    return of


_PAIRS = [
    (("single", "legacy"), ("tp2_pp2", "legacy")),
    (("single", "torch_dist"), ("pp2_vpp2", "legacy")),
    (("single", "legacy"), ("tp2", "torch_dist")),
    (("moe", "torch_dist"), ("ep2", "legacy")),
    pytest.param(("bf16", "legacy"), ("bf16_tp2", "torch_dist"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("left", "right"), _PAIRS)
def test_layouts_and_formats_agree(saved, left, right):
    # Adam makes a full step of a gradient that is mere rounding: in bf16 some elements go the other way.
    result = diff(open_checkpoint(saved(*left)), open_checkpoint(saved(*right)), 0.5 if "bf16" in left else 1e-3)
    assert {state for state, count in result.counts.items() if count} == {"equal"}, result.tensors[:3]
    assert result.problems == []
    kinds = {item.kind for item in result.tensors}
    assert kinds == {"parameter", "exp_avg", "exp_avg_sq", *(["master"] if "bf16" in left else [])}
    # Every weight has its state: none was lost on the way from numbers to names.
    by_kind = {kind: {item.name for item in result.tensors if item.kind == kind} for kind in kinds}
    assert all(names == by_kind["parameter"] for names in by_kind.values())
    assert len(by_kind["parameter"]) > 30


def test_two_formats_of_one_state_are_equal_to_the_bit(saved):
    result = diff(open_checkpoint(saved("single", "legacy")), open_checkpoint(saved("single", "torch_dist")))
    assert {state for state, count in result.counts.items() if count} == {"equal"}
    assert all(item.digests[0] == item.digests[1] for item in result.tensors)


def test_the_whole_is_what_the_files_hold(saved):
    """Gate and up halves of two ranks, joined by hand in NumPy from the files themselves."""
    root = saved("tp2_pp2", "legacy")
    files = [root / "iter_0000001" / f"mp_rank_0{tp}_001" / "model_optim_rng.pt" for tp in (0, 1)]
    local = [torch.load(file, weights_only=False)["model"]["decoder.layers.1.mlp.linear_fc1.weight"] for file in files]
    halves = [np.split(part.numpy(), 2) for part in local]
    whole = np.concatenate([halves[0][0], halves[1][0], halves[0][1], halves[1][1]])
    # Layer 1 of the second stage is layer 3 of the model.
    found = open_checkpoint(root).tensors["parameter", "decoder.layers.3.mlp.linear_fc1.weight"]
    assert found.shape == whole.shape
    np.testing.assert_array_equal(found.load().numpy(), whole)


def test_the_digest_is_that_of_a_dump(saved):
    from msprobe_megatron.analysis.checkpoints.differ import _digest
    from msprobe_megatron.run_directory.digest import numbered_into

    x = open_checkpoint(saved("single", "legacy")).tensors["parameter", "decoder.final_layernorm.weight"].load()
    word = torch.zeros(1, dtype=torch.int64)
    numbered_into(x, None, word, torch.zeros(0))
    assert int(_digest(x), 16) == int(word) % 2**64


def test_a_distributed_optimizer(saved):
    """Its master weights are compared with the weights of the same checkpoint too."""
    result = diff(open_checkpoint(saved("single", "legacy")), open_checkpoint(saved("distopt", "torch_dist")), 1e-3)
    assert result.problems == []
    assert result.counts["differs"] == result.counts["layout"] == result.counts["only_left"] == 0
    assert {item.kind for item in result.tensors if item.state == "only_right"} == {"master"}


_BUFFERS = [
    (("single", "legacy"), ("distopt_buckets", "legacy")),
    pytest.param(("tp2_pp2", "legacy"), ("distopt_tp2_pp2", "legacy"), marks=pytest.mark.slow),
    (("moe", "legacy"), ("distopt_ep2", "legacy")),
    pytest.param(("bf16", "legacy"), ("distopt_vpp2", "legacy"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("left", "right"), _BUFFERS)
def test_buffers_of_a_distributed_optimizer_are_taken_apart(saved, left, right):
    """`distrib_optim.pt` against the state of a plain optimizer, of another layout."""
    result = diff(open_checkpoint(saved(*left)), open_checkpoint(saved(*right)), 0.5 if "bf16" in left else 1e-3)
    assert result.problems == []
    assert result.counts["differs"] == result.counts["layout"] == result.counts["only_left"] == 0, result.tensors[:3]
    assert {item.kind for item in result.tensors if item.state == "only_right"} <= {"master"}
    by_kind = {kind: sum(item.kind == kind for item in result.tensors) for kind in ("parameter", "exp_avg", "master")}
    assert by_kind["parameter"] == by_kind["exp_avg"] == by_kind["master"] > 30


def test_buffers_that_do_not_hold_the_weights_are_said(saved, tmp_path):
    root = tmp_path / "odd"
    shutil.copytree(saved("distopt_buckets", "legacy"), root)
    file = root / "iter_0000001" / "mp_rank_00" / "distrib_optim.pt"
    content = torch.load(file, weights_only=True)
    next(iter(content[0].values()))["param"].add_(1)
    torch.save(content, file)
    result = diff(open_checkpoint(root), open_checkpoint(root))
    assert all("do not lie in its buffers 0.(torch.float32, torch.float32)" in text for text in result.problems)
    assert result.problems
    kinds = {item.kind for item in result.tensors}
    assert kinds == {"parameter", "optimizer_buffer"}, "they are still compared, as they lie"


def test_places_in_buffers():
    """Buckets by hand: each weight on a multiple of 64 of its bucket, padding between buckets left out."""
    torch.manual_seed(2)
    weights = [torch.randn(n) for n in (100, 3, 200, 64, 5)]
    starts, flat = [], torch.zeros(0)
    for bucket in (weights[:2], weights[2:4], weights[4:]):
        base = flat.numel()
        for weight in bucket:
            flat = torch.cat([flat, torch.zeros(-(flat.numel() - base) % 64), weight])
            starts.append(flat.numel() - weight.numel())
    assert places_of(weights, flat) == starts == [0, 128, 131, 387, 451]
    assert places_of(weights, flat[:-1]) is None
    assert places_of(weights[::-1], flat) is None
    # Nothing but zeros fits in several ways; the size of the whole decides.
    assert places_of([torch.zeros(3), torch.zeros(4)], torch.zeros(68)) == [0, 64]
    assert places_of([torch.zeros(3), torch.zeros(4)], torch.zeros(7)) == [0, 3]
    # Before 0.7: buckets apart, each with its padding.
    padded = torch.cat([weights[0], torch.zeros(28), weights[1], torch.zeros(125), weights[2]])
    assert places_of(weights[:3], padded, buckets=(0, 256)) == [0, 128, 256]


def test_megatrons_own_mistake_is_said(saved):
    """With several padded buckets Megatron 0.15 and later read the state of torch_dist from shifted places."""
    checkpoint = open_checkpoint(saved("distopt_buckets", "torch_dist"))
    names = [name for kind, name in checkpoint.tensors if kind == "parameter"]
    wrong = [
        name
        for name in names
        if not np.array_equal(*(checkpoint.tensors[kind, name].load().numpy() for kind in ("parameter", "master")))
    ]
    said = diff(checkpoint, checkpoint).problems
    assert bool(said) == bool(wrong)
    assert all(text.endswith(f" and {len(wrong) - 1} more") for text in said)
    assert all(any(f"master weights differ from the weights: {name} " in text for name in wrong) for text in said)


def _changed(saved, tmp_path, change):
    root = tmp_path / "changed"
    shutil.copytree(saved("tp2_pp2", "legacy"), root)
    file = root / "iter_0000001" / "mp_rank_01_001" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    change(content)
    torch.save(content, file)
    return root


def test_a_changed_weight_is_named(saved, tmp_path, capsys):
    def change(content):
        content["model"]["decoder.layers.0.mlp.linear_fc2.weight"][0, 0] += 1
        content["model"]["decoder.layers.1.mlp.linear_fc2.weight"][0, 0] = torch.nan
        content["optimizer"]["state"][3]["exp_avg"] *= 2

    root = _changed(saved, tmp_path, change)
    assert main(["ckpt-diff", str(saved("tp2_pp2", "legacy")), str(root), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    odd = {(item["kind"], item["name"]): item for item in answer["tensors"] if item["state"] != "equal"}
    weight = odd["parameter", "decoder.layers.2.mlp.linear_fc2.weight"]
    assert (weight["state"], weight["differing"], weight["max_abs"]) == ("differs", 1, 1.0)
    assert weight["digests"][0] != weight["digests"][1]
    assert 0 < weight["cosine"] < 1
    assert sum(item["kind"] == "exp_avg" for item in odd.values()) == 1
    nan = odd["parameter", "decoder.layers.3.mlp.linear_fc2.weight"]
    assert (nan["relative"], nan["differing"]) == (None, 1)
    assert answer["tensors"][0] == nan  # nothing is worse
    assert main(["ckpt-diff", str(saved("tp2_pp2", "legacy")), str(root)]) == 1
    assert "decoder.layers.2.mlp.linear_fc2.weight" in capsys.readouterr().out
    assert main(["ckpt-diff", str(root), str(root)]) == 0


def test_what_only_one_has_and_what_has_another_shape(saved, tmp_path):
    def change(content):
        model = content["model"]
        model["decoder.extra.weight"] = torch.ones(3)
        model["decoder.final_layernorm.weight"] = torch.ones(7)

    root = tmp_path / "more"
    shutil.copytree(saved("single", "legacy"), root)
    file = root / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    change(content)
    torch.save(content, file)
    result = diff(open_checkpoint(saved("single", "legacy")), open_checkpoint(root))
    odd = {item.name: item for item in result.tensors if item.state != "equal" and item.kind == "parameter"}
    assert odd["decoder.extra.weight"].state == "only_right"
    assert odd["decoder.final_layernorm.weight"].reason == "shape (32,) vs (7,)"
    # The states no longer fit the weights: said, not guessed.
    assert any("fit no sequence of weights" in text for text in result.problems)


def test_replicas_that_differ_are_not_merged(saved, tmp_path):
    def change(content):
        content["model"]["decoder.final_layernorm.weight"] += 1

    result = diff(open_checkpoint(saved("tp2_pp2", "legacy")), open_checkpoint(_changed(saved, tmp_path, change)))
    odd = [item for item in result.tensors if item.state != "equal"]
    assert [(item.name, item.state) for item in odd] == [("decoder.final_layernorm.weight", "layout")]
    assert "differs between tensor-parallel ranks" in odd[0].reason


def test_vocabularies_of_another_padding(saved, tmp_path):
    root = tmp_path / "padded"
    shutil.copytree(saved("single", "legacy"), root)
    file = root / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    words = content["model"]["embedding.word_embeddings.weight"]
    content["model"]["embedding.word_embeddings.weight"] = torch.cat([words, torch.ones(16, words.shape[1])])
    content.pop("optimizer")
    torch.save(content, file)
    result = diff(open_checkpoint(saved("single", "legacy")), open_checkpoint(root))
    item = next(i for i in result.tensors if i.name == "embedding.word_embeddings.weight" and i.kind == "parameter")
    assert (item.state, item.reason) == ("equal", "vocabulary padded to 128 and 144: compared the first 128 rows")


class _Evil:
    def __reduce__(self):
        return os.mkdir, (os.environ["MSPROBE_TEST_EVIL"],)


def test_nothing_in_a_file_is_run(saved, tmp_path, monkeypatch, capsys):
    trap = tmp_path / "trap"
    monkeypatch.setenv("MSPROBE_TEST_EVIL", str(trap))
    root = _changed(saved, tmp_path, lambda content: content.update(more=_Evil()))
    for more in ([], ["--trust"]):
        assert main(["ckpt-diff", str(root), str(root), *more]) == 2
        assert "posix.mkdir" in capsys.readouterr().err
        assert not trap.exists()


class _Loud:
    def __init__(self):
        self.value = 1

    def __setstate__(self, state):
        raise AssertionError("this ran")


def test_strange_classes_are_refused_until_trusted_and_never_run(saved, tmp_path, capsys):
    root = _changed(saved, tmp_path, lambda content: content.update(more=_Loud()))
    assert main(["ckpt-diff", str(root), str(root)]) == 2
    assert "test_ckpt_diff._Loud" in capsys.readouterr().err
    assert main(["ckpt-diff", str(root), str(root), "--trust"]) == 0


class _Member:
    """A member of an Enum as Python 3.11.0 to 3.11.3 write it; and one that would be a way to something else."""

    def __init__(self, of, name):
        self.of, self.name = of, name

    def __reduce__(self):
        return getattr, (self.of, self.name)


def test_members_of_enums_are_read_however_they_were_written_and_reach_nothing(saved, tmp_path):
    members = [_Member(signal.Signals, "SIGTERM"), _Member(signal.Signals, "__init__")]
    root = _changed(saved, tmp_path, lambda content: content.update(more=members))
    held = load_file(root / "iter_0000001" / "mp_rank_01_001" / "model_optim_rng.pt")["more"]
    assert len(held) == 2 and all(isinstance(one, StandIn) for one in held)
    assert main(["ckpt-diff", str(root), str(root)]) == 0


def test_nothing_in_an_index_is_run(saved, tmp_path, monkeypatch):
    trap = tmp_path / "trap"
    monkeypatch.setenv("MSPROBE_TEST_EVIL", str(trap))
    root = tmp_path / "evil"
    shutil.copytree(saved("single", "torch_dist"), root)
    index = root / "iter_0000001" / ".metadata"
    index.write_bytes(pickle.dumps(_Evil()))
    with pytest.raises(CheckpointError, match=r"\.metadata: cannot be read"):
        open_checkpoint(root)
    assert not trap.exists()
    index.write_bytes(pickle.dumps({"a": 1})[:-3])
    with pytest.raises(CheckpointError):
        open_checkpoint(root)


@pytest.mark.parametrize("value", [{"a": [1, 2.5, None, True, "x"], 3: (4, (5, 6), ())}, [[]] * 3, -(10**30)])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_are_read_as_they_were_written(value, protocol):
    assert read_pickle(pickle.dumps(value, protocol)) == value


def test_a_class_in_a_pickle_stays_a_name():
    record = read_pickle(pickle.dumps(torch.Size((2, 3))))
    assert (record.name, record.arguments) == ("torch.Size", ((2, 3),))
    with pytest.raises(PickleError, match="PERSID|BINPERSID|opcode"):
        read_pickle(b"\x80\x02U\x01aQ.")


def test_what_is_no_checkpoint_says_so(tmp_path, capsys):
    assert main(["ckpt-diff", str(tmp_path / "none"), str(tmp_path)]) == 2
    assert "not a directory" in capsys.readouterr().err
    assert main(["ckpt-diff", str(tmp_path), str(tmp_path)]) == 2
    assert "neither .metadata (torch_dist) nor mp_rank_*" in capsys.readouterr().err
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12")
    assert main(["ckpt-diff", str(tmp_path), str(tmp_path)]) == 2
    assert "iter_0000012 is not there" in capsys.readouterr().err
