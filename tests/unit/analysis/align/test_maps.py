"""Maps of names: every one of the kit is well-formed, a user's extends it, and what is wrong in one is named."""

import numpy as np
import pytest

from msprobe_megatron.analysis.align.forms import FORMS, Sizes
from msprobe_megatron.analysis.align.name_map import known_maps, load_map, map_of, place
from msprobe_megatron.config import ConfigError

ASKED = [
    "Llama",
    "Mistral",
    "Aquila",
    "InternLM",
    "InternLM2",
    "Qwen2",
    "Qwen3",
    "Qwen3Moe",
    "Mixtral",
    "DeepseekV2",
    "DeepseekV3",
    "Gemma",
    "GptOss",
    "Glm",
    "Glm4Moe",
    "Baichuan",
    "Bloom",
]


@pytest.mark.parametrize("name", list(known_maps()))
def test_a_map_of_the_kit_names_tensors(name):
    found = load_map(name)
    assert found.name == name and found.architectures and len(found.weights) > 10
    for target, rules in found.tensors.items():
        assert place(target) and all(place(source) for rule in rules for source in rule.sources)
    for rules in found.weights.values():
        assert all(" " not in source for rule in rules for source in rule.sources)


@pytest.mark.parametrize("name", ASKED)
def test_every_architecture_has_one_map(name):
    holders = [key for key in known_maps() if f"{name}ForCausalLM" in load_map(key).architectures]
    assert len(holders) == 1 and map_of(f"{name}ForCausalLM").name == holders[0]


def test_a_map_of_the_user_extends_one(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "map: mine\nextends: hf:llama\narchitectures: [MineForCausalLM]\ntheir_layers: transformer.blocks\n"
        "layer_weights:\n  self_attention.linear_qkv.weight: {qkv_blocks: attn.all.weight}\n"
        "  mlp.linear_fc1.bias: null\n"
    )
    found = load_map(str(file))
    (rule,) = found.weights["decoder.layers.{l}.self_attention.linear_qkv.weight"]
    assert (rule.form, rule.sources) == ("qkv_blocks", ("transformer.blocks.{l}.attn.all.weight",))
    assert "decoder.layers.{l}.mlp.linear_fc1.bias" not in found.weights
    assert "decoder.layers.{l}.mlp.linear_fc1.weight" in found.weights


@pytest.mark.parametrize(
    "text, problem",
    [
        ("extends: mine.yaml", "is not a map"),
        ("extends: hf:none", "is not a map"),
        ("weight: {}", "unknown key"),
        ("weights: {a: {twisted: b}}", "twisted"),
        ("weights: {a: {same: b, qkv: c}}", "not one form"),
    ],
)
def test_what_is_wrong_in_a_map_is_named(tmp_path, text, problem):
    file = tmp_path / "mine.yaml"
    file.write_text(f"map: mine\n{text}\n")
    with pytest.raises(ConfigError, match=problem) as error:
        load_map(str(file))
    assert "mine.yaml" in str(error.value)


def test_forms_by_hand():
    sizes = Sizes(heads=4, groups=2)
    q, k, v = np.arange(8), 10 + np.arange(4), 20 + np.arange(4)
    grouped = [0, 1, 2, 3, 10, 11, 20, 21, 4, 5, 6, 7, 12, 13, 22, 23]
    assert FORMS["qkv"]([q, k, v], sizes, 0).tolist() == grouped
    assert FORMS["qkv_blocks"]([np.concatenate((q, k, v))], sizes, -1).tolist() == grouped
    assert FORMS["joined"]([q, k], sizes, 0).tolist() == [*q, *k]
    assert FORMS["every_other"]([np.arange(6)], sizes, 0).tolist() == [0, 2, 4, 1, 3, 5]
    assert FORMS["swapped"]([np.arange(4)], sizes, 0).tolist() == [2, 3, 0, 1]
    assert FORMS["transposed_every_other"]([np.arange(8).reshape(2, 4)], sizes, 0).tolist() == [
        [0, 4],
        [2, 6],
        [1, 5],
        [3, 7],
    ]
