"""Models of transformers against the same in megatron-core: clean pairs agree, faults of a conversion are named."""

import json
import subprocess
import sys

import pytest
import torch

from msprobe_megatron.analysis.align.align import compare_aligned, with_causes_of_weights
from msprobe_megatron.analysis.align.logprobs import logprobs, samples_of
from msprobe_megatron.analysis.load.run import open_run
from msprobe_megatron.cli import main
from tests.jobs.align import jobs
from tests.jobs.align.architectures import ARCHITECTURES, hugging_face, tokens
from tests.jobs.align.faults import FAULTS
from tests.support.forked import prepare, run_forked

pytest.importorskip("transformers")
IN_BF16 = ("llama", "qwen3", "mixtral", "deepseek_v3")
NAMES = list(ARCHITECTURES)
CLEAN = [
    pytest.param(name, dtype, marks=() if dtype == "fp32" or name in IN_BF16 else pytest.mark.slow)
    for name in NAMES
    for dtype in ("fp32", "bf16")
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """All runs of this module: transformers, megatron-core on one rank, and the faults."""
    root = tmp_path_factory.mktemp("align")
    jobs.environment()
    prepare()
    jobs.record_hugging_face(str(root), NAMES, ["fp32", "bf16"])
    run_forked(1, jobs.record_megatron, str(root), NAMES, ["fp32", "bf16"], "tp1", timeout=300)
    run_forked(1, jobs.record_faults, str(root), list(FAULTS), timeout=300)
    run_forked(4, jobs.record_megatron, str(root), ["llama", "qwen3_moe"], ["fp32"], "tp2pp2", 2, 2, timeout=300)
    return root


def compared(root, golden, run):
    return compare_aligned(open_run(root / golden), open_run(root / run))


@pytest.mark.parametrize("name, dtype", CLEAN)
def test_a_clean_conversion_agrees(root, name, dtype):
    result = compared(root, f"hf_{name}_{dtype}", f"tp1_{name}_{dtype}")
    assert result.verdict == "agree", result.first_divergence
    assert result.counts["agree"] > 55 and not result.causes
    assert result.hints[0].startswith("weights equal: all")


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_a_clean_conversion_agrees_in_another_layout(root, name):
    result = compared(root, f"hf_{name}_fp32", f"tp2pp2_{name}_fp32")
    assert result.verdict == "agree", result.first_divergence
    assert result.counts["agree"] > 55 and not result.causes


@pytest.mark.parametrize("number, fault", list(enumerate(FAULTS)), ids=list(FAULTS))
def test_a_fault_of_the_conversion_is_named(root, number, fault):
    planted = FAULTS[fault]
    result = compared(root, f"hf_{planted.architecture}_fp32", f"fault_{number}")
    assert result.verdict == "diverged"
    assert result.causes and result.causes[0]["id"] == planted.expected, result.causes


def told(root, golden, run):
    left, right = open_run(root / golden), open_run(root / run)
    return with_causes_of_weights(logprobs(left, right), left, right)


@pytest.mark.parametrize("run", ["tp1_llama_fp32", "tp2pp2_llama_fp32"])
def test_log_probs_of_a_clean_pair_agree(root, run):
    result = told(root, "hf_llama_fp32", run)
    assert result.agree and result.samples == 2 and result.largest < 1e-4 and result.beyond == 0
    with torch.no_grad():
        logits = hugging_face("llama")(input_ids=tokens(), use_cache=False).logits.double().log_softmax(-1)
    expected = logits[:, :-1].gather(-1, tokens()[:, 1:, None]).squeeze(-1).numpy()
    found = {sample.ids: sample.scores for sample in samples_of(open_run(root / run))}
    for ids, scores in zip(tokens().tolist(), expected, strict=True):
        assert found[tuple(ids)] == pytest.approx(scores, abs=1e-4)


def test_causes_of_a_log_prob_mismatch_are_told_apart(root, tmp_path):
    stale = told(root, "hf_llama_fp32", f"fault_{list(FAULTS).index('gate and up swapped')}")
    assert stale.causes[0]["id"] == "gate-up-swapped"
    turned = told(root, "hf_llama_fp32", f"fault_{list(FAULTS).index('rope base')}")
    assert turned.causes[0]["id"] == "setting:rotary_base"
    assert "arithmetic" in [cause["id"] for cause in turned.causes]
    assert turned.k3 > 0 and turned.worst[0]["position"] > 0
    model = hugging_face("llama")
    model.lm_head.register_forward_hook(lambda module, args, output: output.bfloat16())
    jobs.record(model, tmp_path / "coarse", lambda: model(input_ids=tokens(), use_cache=False))
    coarse = logprobs(open_run(root / "hf_llama_fp32"), open_run(tmp_path / "coarse"))
    assert [cause["text"] for cause in coarse.causes] == ["logits in float32 against bfloat16"]
    other = tokens()
    other[:, 0] = 95
    model = hugging_face("llama")
    jobs.record(model, tmp_path / "template", lambda: model(input_ids=other, use_cache=False))
    found = logprobs(open_run(root / "hf_llama_fp32"), open_run(tmp_path / "template"))
    assert found.samples == 0 and found.causes[0]["id"] == "other-tokens"
    assert "from position 0 on" in found.causes[0]["text"]


def test_record_hf_and_compare_as_commands(root, tmp_path, capsys):
    hugging_face("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "tokens.json").write_text(json.dumps({"input_ids": tokens().tolist()}))
    made = [
        "record-hf",
        str(tmp_path / "model"),
        "--data",
        str(tmp_path / "tokens.json"),
        "--out",
        str(tmp_path / "golden"),
    ]
    # A process of its own: this one emulates a device, which transformers would build its tables on.
    command = [sys.executable, "-m", "msprobe_megatron.cli", *made, "--device", "cpu", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1])["class"] == "LlamaForCausalLM"
    assert main(["compare", str(tmp_path / "golden"), str(root / "tp1_llama_fp32")]) == 0
    assert "weights equal: all 15" in capsys.readouterr().out
    wrong = list(FAULTS).index("rope base")
    assert main(["compare", str(tmp_path / "golden"), str(root / f"fault_{wrong}"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["causes"][0]["text"] == "rope base 10000 against 500000"
    # At position 0 nothing is rotated.
    assert "core_attention output differs from position 1 on" in found["hints"][0]


@pytest.mark.slow
def test_every_architecture_agrees_in_another_layout(root):
    for dtype in ("fp32", "bf16"):
        run_forked(4, jobs.record_megatron, str(root), NAMES, [dtype], f"all_{dtype}", 2, 2, timeout=600)
        for name in NAMES:
            result = compared(root, f"hf_{name}_{dtype}", f"all_{dtype}_{name}_{dtype}")
            assert result.verdict == "agree" and not result.causes, (name, dtype, result.first_divergence)


@pytest.mark.parametrize(
    "text, problem",
    [("[[1, -2]]", "no samples"), ("{}", "no samples"), ("[[1,", "cannot be read"), ("[[999]]", "token id 999")],
)
def test_tokens_that_are_none_are_refused(root, tmp_path, text, problem, capsys):
    hugging_face("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "tokens.json").write_text(text)
    arguments = [
        "record-hf",
        str(tmp_path / "model"),
        "--data",
        str(tmp_path / "tokens.json"),
        "--out",
        str(tmp_path / "o"),
    ]
    assert main(arguments) == 2
    assert problem in capsys.readouterr().err


def test_broken_rotary_angles_are_named_where_settings_agree(root, tmp_path):
    model = hugging_face("llama")
    model.model.rotary_emb.inv_freq.mul_(0.5)
    jobs.record(model, tmp_path / "golden", lambda: model(input_ids=tokens(), use_cache=False))
    result = compare_aligned(open_run(tmp_path / "golden"), open_run(root / "tp1_llama_fp32"))
    assert result.verdict == "diverged" and result.causes[0]["id"] == "rope-angles"
    assert "from position 1 on" in result.causes[0]["text"]


def test_an_unknown_map_is_refused(root, capsys):
    arguments = ["compare", str(root / "hf_llama_fp32"), str(root / "tp1_llama_fp32"), "--map", "hf:none"]
    assert main(arguments) == 2
    assert "hf:llama" in capsys.readouterr().err
