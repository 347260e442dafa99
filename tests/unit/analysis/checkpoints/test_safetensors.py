"""ckpt-diff on checkpoints of Hugging Face: against each other without torch, and against Megatron's by a map."""

import argparse
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from msprobe_megatron.analysis.align.manifest import check
from msprobe_megatron.analysis.checkpoints.differ import diff
from msprobe_megatron.analysis.checkpoints.held import CheckpointError
from msprobe_megatron.analysis.checkpoints.opening import open_checkpoint
from msprobe_megatron.cli import main
from msprobe_megatron.run_directory.digest import numbered_into
from msprobe_megatron.run_directory.plain_digest import digest_of
from tests.jobs.align.faults import FAULTS
from tests.jobs.align.megatron_side import converted

HIDDEN, FFN, HEADS, GROUPS, VOCABULARY = 16, 24, 4, 2, 20
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
}


def state():
    """Weights as a Llama of transformers has them."""
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    for layer in range(2):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (HIDDEN,),
                "post_attention_layernorm": (HIDDEN,),
                "self_attn.q_proj": (HIDDEN, HIDDEN),
                "self_attn.k_proj": (HIDDEN // HEADS * GROUPS, HIDDEN),
                "self_attn.v_proj": (HIDDEN // HEADS * GROUPS, HIDDEN),
                "self_attn.o_proj": (HIDDEN, HIDDEN),
                "mlp.gate_proj": (FFN, HIDDEN),
                "mlp.up_proj": (FFN, HIDDEN),
                "mlp.down_proj": (HIDDEN, FFN),
            }.items()
        }
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}


def hugging_face(path, weights, shards=1):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    if shards == 1:
        save_file(weights, path / "model.safetensors")
        return path
    index = {}
    for number in range(shards):
        part = {name: weights[name] for name in list(weights)[number::shards]}
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        save_file(part, path / file)
        index |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return path


def megatron(path, weights):
    folder = path / "iter_0000007" / "mp_rank_00"
    folder.mkdir(parents=True)
    sizes = {f"{axis}_model_parallel_size": 1 for axis in ("tensor", "pipeline", "expert")}
    args = argparse.Namespace(**sizes, swiglu=True, num_layers=2, untie_embeddings_and_output_weights=True)
    torch.save(
        {"args": args, "checkpoint_version": 3.0, "iteration": 7, "model": weights}, folder / "model_optim_rng.pt"
    )
    return path / "iter_0000007"


def test_one_file_and_several_are_equal(tmp_path):
    left = hugging_face(tmp_path / "one", state())
    right = hugging_face(tmp_path / "three", state(), shards=3)
    result = diff(open_checkpoint(left), open_checkpoint(right))
    assert result.counts["equal"] == len(state()) == len(result.tensors)


def test_a_flipped_element_is_found_and_no_torch_is_imported(tmp_path):
    changed = state()
    changed["model.norm.weight"][3] += 1
    left, right = hugging_face(tmp_path / "a", state()), hugging_face(tmp_path / "b", changed)
    code = (
        "import sys; from msprobe_megatron.cli import main;"
        f"found = main(['ckpt-diff', {str(left)!r}, {str(right)!r}, '--json']);"
        "assert 'torch' not in sys.modules; sys.exit(found)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    first = json.loads(done.stdout)["tensors"][0]
    assert (first["name"], first["state"], first["differing"]) == ("model.norm.weight", "differs", 1)


def test_the_digest_without_torch_is_that_of_the_dump():
    for x in (torch.randn(7, 5), torch.randn(33).to(torch.bfloat16), torch.arange(9), torch.randn(2, 3).double()):
        word = torch.zeros(1, dtype=torch.int64)
        numbered_into(x, None, word, torch.zeros(0))
        words = x.view(torch.int16).numpy() if x.dtype is torch.bfloat16 else x.numpy()
        assert digest_of(words) == int(word.item()) & (1 << 64) - 1
    assert digest_of(np.arange(3_000_000, dtype="<i4")) == _by_pieces()


def _by_pieces():
    word = torch.zeros(1, dtype=torch.int64)
    numbered_into(torch.arange(3_000_000, dtype=torch.int32), None, word, torch.zeros(0))
    return int(word.item()) & (1 << 64) - 1


def test_megatron_against_hugging_face(tmp_path, capsys):
    theirs = hugging_face(tmp_path / "hf", state(), shards=2)
    clean = megatron(tmp_path / "clean", converted("llama", state()))
    assert main(["ckpt-diff", str(theirs), str(clean)]) == 0
    wrong = {name: weight.clone() for name, weight in converted("llama", state()).items()}
    FAULTS["gate and up swapped"].weights(wrong)
    assert main(["ckpt-diff", str(theirs), str(megatron(tmp_path / "wrong", wrong)), "--json"]) == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [cause["id"] for cause in found["causes"]] == ["gate-up-swapped"]
    assert found["counts"]["differs"] == 2


def test_a_manifest_of_megatron_checks_a_model_of_hugging_face(tmp_path, capsys):
    ours = megatron(tmp_path / "m", converted("llama", state()))
    assert main(["weights", str(ours), "--manifest", str(tmp_path / "weights.json")]) == 0
    theirs = hugging_face(tmp_path / "hf", state())
    assert main(["weights", str(theirs), "--check", str(tmp_path / "weights.json")]) == 0
    live = state()
    clean = {"differ": [], "missing": [], "unexpected": [], "lossy": []}
    assert check(tmp_path / "weights.json", live.items(), "hf:llama", CONFIG) == clean
    live["model.layers.1.self_attn.k_proj.weight"][0, 0] += 1
    stale = check(tmp_path / "weights.json", live.items(), "hf:llama", CONFIG)
    assert stale["differ"] == ["decoder.layers.1.self_attention.linear_qkv.weight"]
    assert not check(tmp_path / "weights.json", live.items(), "hf:llama", CONFIG, lossy=["layers.1"])["differ"]
    stale = hugging_face(tmp_path / "stale", live)
    assert main(["weights", str(stale), "--check", str(tmp_path / "weights.json"), "--json"]) == 1


def test_a_map_that_lacks_weights_says_so(tmp_path):
    more = {**state(), "model.layers.0.self_attn.extra.weight": torch.ones(3)}
    theirs, ours = hugging_face(tmp_path / "hf", more), megatron(tmp_path / "m", converted("llama", state()))
    result = diff(open_checkpoint(theirs), open_checkpoint(ours))
    assert any(
        "1 weights are not in the map hf:llama: model.layers.0.self_attn.extra.weight" in p for p in result.problems
    )


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "absent.safetensors"])
def test_an_index_names_files_beside_it_only(tmp_path, name):
    path = hugging_face(tmp_path / "hf", state())
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="names"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "header",
    [
        b"\xff" * 16,
        b"\x02\0\0\0\0\0\0\0[]",
        b'\x3a\0\0\0\0\0\0\0{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}',
    ],
)
def test_a_damaged_file_is_refused(tmp_path, header):
    (tmp_path / "model.safetensors").write_bytes(header)
    with pytest.raises(CheckpointError, match="safetensors"):
        open_checkpoint(tmp_path)
