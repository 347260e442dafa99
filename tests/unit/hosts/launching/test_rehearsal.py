"""--rehearse: an untouched recipe's command line on its way to the launcher of a machine without accelerator."""

import re
import sys

import pytest

from msprobe_megatron.config.document import ConfigError
from msprobe_megatron.hosts.launching.command_line import Launch
from msprobe_megatron.hosts.launching.flags import Flag, flags_of
from msprobe_megatron.hosts.rehearsal.rewrite import accelerator, host_of, ranks_of, read_loosely, rehearse

# In the manner of ModelLink's recipes: placeholders of several words, unquoted where they are used.
RECIPE = """#!/bin/bash
MASTER_ADDR="your master node IP"
DATA_PATH="your data path"
TOKENIZER_MODEL="your tokenizer path"
CKPT_LOAD_DIR="your model ckpt path"
DISTRIBUTED_ARGS="
    --nproc_per_node 8 \\
    --nnodes 4 \\
    --node_rank 3 \\
    --master_addr $MASTER_ADDR \\
    --master_port 6000
"
GPT_ARGS="
    --tensor-model-parallel-size 8 \\
    --pipeline-model-parallel-size 4 \\
    --sequence-parallel \\
    --num-layers 32 \\
    --hidden-size 4096 \\
    --ffn-hidden-size 11008 \\
    --num-attention-heads 32 \\
    --group-query-attention \\
    --num-query-groups 8 \\
    --tokenizer-type Llama2Tokenizer \\
    --tokenizer-model ${TOKENIZER_MODEL} \\
    --seq-length 4096 \\
    --max-position-embeddings 4096 \\
    --micro-batch-size 2 \\
    --global-batch-size 256 \\
    --lr 1.25e-6 \\
    --train-iters 5000 \\
    --lr-warmup-fraction 0.01 \\
    --init-method-std 0.01 \\
    --use-mc2 \\
    --use-fused-rmsnorm \\
    --bf16
"
torchrun $DISTRIBUTED_ARGS pretrain_gpt.py \\
    $GPT_ARGS \\
    --data-path $DATA_PATH \\
    --split 949,50,1 \\
    --distributed-backend nccl \\
    --load $CKPT_LOAD_DIR \\
    --save $CKPT_LOAD_DIR \\
    | tee logs/train.log
"""


@pytest.fixture
def checkout(bench):
    """A folder that looks like a checkout of ModelLink as its installation leaves it."""
    for name in ("modellink", "megatron/training", "mindspeed"):
        (bench.folder / name).mkdir(parents=True)
    return bench.folder


def values(argv):
    """Flag -> values, by argparse's reading of a command line: the last of two equal flags counts."""
    found, name = {}, None
    for word in argv:
        if word.startswith("--"):
            name = word
            found[name] = []
        elif name:
            found[name].append(word)
    return found


def test_an_untouched_recipe_reaches_the_launcher_small(bench, checkout):
    recipe = bench.recipe(RECIPE)
    done = bench.run("--rehearse", "--config", "probe.yaml", "--output", "out", "--", recipe)
    assert done.returncode == 0, done.stdout + done.stderr
    assert recipe.read_text() == RECIPE
    (call,) = bench.called()
    at = call.argv.index("pretrain_gpt.py")
    assert call.argv[at - 2 : at] == ["-m", "msprobe_megatron.hosts.rehearsal"]
    options = values(call.argv[: at - 2])
    assert options == {"--standalone": [], "--local-addr": ["localhost"], "--nproc-per-node": ["2"]}
    given = values(call.argv[at + 1 :])
    assert not [word for word in call.argv if word in ("your", "path", "IP")]
    expected = {"pipeline-model-parallel-size": 2, "tensor-model-parallel-size": 1, "num-layers": 2, "hidden-size": 64}
    expected |= {"ffn-hidden-size": 128, "num-attention-heads": 4, "num-query-groups": 2, "seq-length": 32}
    expected |= {"max-position-embeddings": 32, "micro-batch-size": 1, "global-batch-size": 4, "train-iters": 5}
    expected |= {"tokenizer-type": "NullTokenizer", "distributed-backend": "gloo", "num-workers": 0}
    expected |= {"lr": "1.25e-6", "init-method-std": "0.01", "msprobe-device": "cpu"}
    assert {name: given[f"--{name}"] for name in expected} == {name: [str(v)] for name, v in expected.items()}
    for switch in ("--mock-data", "--sequence-parallel", "--group-query-attention", "--use-fused-rmsnorm", "--bf16"):
        assert given[switch] == [], switch
    gone = {"--use-mc2", "--data-path", "--tokenizer-model", "--load", "--save", "--lr-warmup-fraction"}
    assert not gone & set(given)
    assert given["--msprobe-output"] == [str(bench.folder / "out")]
    # Nothing stands there twice: a reader of the process list sees what counts.
    assert len([word for word in call.argv if word.startswith("--")]) == len(given) + len(options)


def test_what_was_changed_is_said(bench, checkout):
    done = bench.run("--rehearse", "--config", "probe.yaml", "--", bench.recipe(RECIPE))
    said = done.stdout
    assert "rehearsal of pretrain_gpt.py on 2 processes" in said
    assert "pipeline 2 (4), tensor 1 (8), data 1; in brackets the recipe's; not rehearsed: tensor" in said
    assert "num-layers 2 (32)" in said
    assert "train-iters 5 (5000)" in said
    assert re.search(r"operators that nothing stands in for: --use-mc2$", said, re.MULTILINE)
    assert re.search(r"files of the real job: --tokenizer-model --data-path --load --save$", said, re.MULTILINE)
    assert "not those of the real job" in said
    assert len([line for line in said.splitlines() if line.startswith("msprobe:")]) <= 10


def test_the_overlay_counts_and_its_probe_fits_the_small_model(bench, checkout):
    # The probe file is gone when the job has ended: the stub has to read it.
    keep = f'cp "$MSPROBE_CONFIG" "{bench.folder}/kept.json"\n'
    recipe = bench.recipe(RECIPE.replace("torchrun", f"{keep}torchrun"))
    done = bench.run("--rehearse", "4", "--overlay", "modellink/llama2_7b", "--", recipe)
    assert done.returncode == 0, done.stderr
    (call,) = bench.called()
    at = call.argv.index("-m")
    assert call.argv[at - 2 : at] == ["--nproc-per-node", "4"]
    given = values(call.argv[at:])
    assert given["--use-deter-comp"] == []
    assert (given["--pipeline-model-parallel-size"], given["--tensor-model-parallel-size"]) == (["2"], ["2"])
    assert "--lr-decay-iters" not in given
    # Drift is told of the recipe, not of what the rehearsal made of it.
    assert "--tensor-model-parallel-size is 8; the overlay expects that it is 1" in done.stdout
    assert "--hidden-size" not in done.stdout
    probe = (bench.folder / "kept.json").read_text()
    assert "layers" not in probe
    assert "modellink_llama2_7b_rehearsal" in probe


@pytest.mark.parametrize(("code", "expected"), [("0", 0), ("3", 3)])
def test_the_exit_code_is_the_launchers_where_tee_has_no_folder(bench, checkout, code, expected):
    done = bench.run("--rehearse", "--config", "probe.yaml", "--", bench.recipe(RECIPE), STUB_CODE=code)
    assert done.returncode == expected
    assert "has no logs/ to write to" in done.stdout or code != "0"


# Recipe's sizes -> those of the rehearsal; the batch is shared by the data-parallel ranks.
@pytest.mark.parametrize(
    ("ranks", "recipe", "expected", "batch"),
    [
        (1, "tensor 8 pipeline 4", "tensor 1 pipeline 1", 4),
        (2, "tensor 8 pipeline 1", "tensor 2 pipeline 1", 4),
        (2, "tensor 1 pipeline 1", "tensor 1 pipeline 1", 4),
        (2, "tensor 1 pipeline 1 expert 8", "tensor 1 pipeline 1 expert 2", 4),
        (2, "tensor 8 pipeline 4 expert 8", "tensor 1 pipeline 1 expert 2", 4),
        (4, "tensor 8 pipeline 4 expert 8", "tensor 1 pipeline 2 expert 2", 4),
        (8, "tensor 8 pipeline 4 expert 8", "tensor 2 pipeline 2 expert 2", 4),
        (3, "tensor 8 pipeline 1", "tensor 1 pipeline 1", 6),
        (3, "tensor 8 pipeline 4", "tensor 1 pipeline 3", 4),
        (6, "tensor 8 pipeline 2", "tensor 1 pipeline 2", 6),
        (8, "tensor 1 pipeline 1", "tensor 1 pipeline 1", 16),
    ],
)
def test_the_layout_keeps_what_fits(tmp_path, ranks, recipe, expected, batch):
    def sizes(text):
        words = text.split()
        return {f"{kind}-model-parallel-size": n for kind, n in zip(words[::2], words[1::2], strict=True)}

    given = [word for name, n in sizes(recipe).items() for word in (f"--{name}", n)]
    done = rehearse(Launch((), "p.py", (*given, "--num-layers", "32")), [], ranks, "modellink", tmp_path)
    found = values(done.words())
    assert {name: found[f"--{name}"][0] for name in sizes(recipe)} == sizes(expected)
    assert found["--global-batch-size"] == [str(batch)]
    stages = int(found["--pipeline-model-parallel-size"][0])
    assert int(found["--num-layers"][0]) == max(2, stages)


def test_context_parallel_stays_where_megatron_itself_does_it(tmp_path):
    launch = Launch((), "p.py", ("--context-parallel-size", "4", "--cp-comm-type", "p2p"))
    there, not_there = (values(rehearse(launch, [], 2, host, tmp_path).words()) for host in ("megatron", "modellink"))
    assert (there["--context-parallel-size"], there["--cp-comm-type"]) == (["2"], ["p2p"])
    assert not_there["--context-parallel-size"] == ["1"]
    assert "--cp-comm-type" not in not_there


def test_megatrons_own_kernels_are_refused_by_the_flags_its_parser_has(tmp_path):
    (tmp_path / "megatron/training").mkdir(parents=True)
    (tmp_path / "megatron/training/arguments.py").write_text("add_argument('--no-bias-gelu-fusion')\n")
    found = values(rehearse(Launch((), "p.py", ("--fp8-format", "e4m3")), [], 2, "megatron", tmp_path).words())
    assert (found["--transformer-impl"], found["--no-bias-gelu-fusion"]) == (["local"], [])
    assert not {"--no-rope-fusion", "--fp8-format"} & set(found)


@pytest.mark.parametrize(("precision", "scale"), [("--fp16", ["1024"]), ("--bf16", ["65536"])])
def test_fp16_begins_with_a_scale_that_does_not_overflow(tmp_path, precision, scale):
    launch = Launch((), "p.py", (precision, "--initial-loss-scale", "65536"))
    assert values(rehearse(launch, [], 2, "modellink", tmp_path).words())["--initial-loss-scale"] == scale


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--load", "your", "path", "--bf16"], [Flag("load", ("your", "path")), Flag("bf16")]),
        (["--lr=1e-3", "--shift", "-1", "-2.5e3"], [Flag("lr", ("1e-3",)), Flag("shift", ("-1", "-2.5e3"))]),
        (["here.txt", "-x", "--a"], [Flag("", ("here.txt",)), Flag("", ("-x",)), Flag("a")]),
        ([], []),
    ],
)
def test_flags_of_words(words, expected):
    assert flags_of(words) == expected
    assert flags_of([word for flag in flags_of(words) for word in flag.words]) == expected


@pytest.mark.parametrize("value", ["your own file", "<where it is>", "/path/to/it", "Please fill in"])
def test_a_placeholder_of_any_flag_is_not_passed_on(tmp_path, value):
    launch = Launch((), "p.py", ("--some-new-file", *value.split(), "--prompt", "yours", "truly"))
    done = rehearse(launch, [], 2, "modellink", tmp_path)
    assert "--some-new-file" not in done.words()
    assert values(done.words())["--prompt"] == ["yours", "truly"]
    assert any("not filled in: --some-new-file" in sentence for sentence in done.said)


@pytest.mark.parametrize(
    ("words", "target", "module"),
    [
        ("--master_addr your master node IP --nnodes 1 pretrain_gpt.py --lr 1", "pretrain_gpt.py", False),
        ("--nnodes 1 -m my.train --lr 1", "my.train", True),
    ],
)
def test_the_script_is_found_among_placeholders(words, target, module):
    launch = read_loosely(words.split())
    assert (launch.target, launch.is_module, launch.arguments) == (target, module, ("--lr", "1"))


def test_a_module_and_use_env_keep_their_meaning(tmp_path):
    launch = read_loosely(["--use_env", "--nnodes", "2", "-m", "my.train", "--lr", "1"])
    words = rehearse(launch, [], 2, "modellink", tmp_path).words()
    assert words[0] == "--use_env"
    at = words.index("my.train")
    assert words[at - 3 : at] == ["-m", "msprobe_megatron.hosts.rehearsal", "-m"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--rehearse", "0"], "--rehearse: '0' is not a number of processes; accepted: 1 to 64"),
        (["--rehearse", "many"], "'many' is not a number of processes"),
        (["--rehearse", "--emit", "copy.sh"], "--rehearse or --emit, not both"),
        (["--rehearse", "--keep-save"], "--keep-save: a rehearsal saves nothing"),
        (["--rehearse", "--device", "npu"], "--device: 'npu': a rehearsal is on the CPU"),
        (["--rehearse", "--overlay", "nobody/nothing"], "'nobody/nothing' is not an overlay"),
    ],
)
def test_mistakes_are_one_sentence(bench, checkout, words, complaint):
    done = bench.run(*words, "--config", "probe.yaml", "--", bench.recipe(RECIPE))
    assert done.returncode == 2
    assert complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert bench.called() == []


@pytest.mark.parametrize(
    ("missing", "complaint"),
    [
        ("megatron/training", "megatron is neither in {folder} nor installed in"),
        ("mindspeed", "mindspeed is neither in {folder} nor installed in"),
        ("modellink", None),
    ],
)
def test_what_is_missing_of_an_installation_is_named(bench, checkout, missing, complaint):
    (bench.folder / missing).rename(bench.folder / "away")
    if complaint is None:
        # What is left looks like Megatron-LM, which needs neither.
        (bench.folder / "megatron").rename(bench.folder / "away too")
        complaint = "{folder} is no checkout a rehearsal knows"
    done = bench.run("--rehearse", "--config", "probe.yaml", "--", bench.recipe(RECIPE))
    assert done.returncode == 2
    (sentence,) = [line for line in done.stdout.splitlines() if line.startswith("msprobe:")]
    assert "; accepted: " in sentence
    assert complaint.format(folder=bench.folder.resolve()) in sentence
    assert "Traceback" not in done.stdout + done.stderr
    assert bench.called() == []


def test_what_the_data_helpers_are_compiled_with_is_named(tmp_path, monkeypatch):
    datasets = tmp_path / "megatron/core/datasets"
    datasets.mkdir(parents=True)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pybind11", None)
    assert host_of(tmp_path, "pretrain_gpt.py") == "megatron"
    (datasets / "Makefile").touch()
    with pytest.raises(ConfigError, match=r"pybind11 \(in .*\) and make and g\+\+ not found"):
        host_of(tmp_path, "pretrain_gpt.py")
    (datasets / "helpers_cpp.so").touch()
    assert host_of(tmp_path, "pretrain_gpt.py") == "megatron"


@pytest.mark.parametrize("name", ["modellink", "mindspeed_llm", "megatron"])
def test_each_host_is_known_by_its_folder(tmp_path, name):
    for part in {name, "megatron/training", "mindspeed"}:
        (tmp_path / part).mkdir(parents=True, exist_ok=True)
    assert host_of(tmp_path, "pretrain_gpt.py") == name


@pytest.mark.parametrize("flag", [True, False])
def test_a_directory_that_holds_a_run_is_refused_before_the_launch(bench, checkout, flag):
    (bench.folder / "out").mkdir()
    (bench.folder / "out/run.json").touch()
    (bench.folder / "probe.yaml").write_text("output: ./out\nsteps: [0]\ndump: {level: L0}\n")
    words = ["--output", "out"] if flag else []
    done = bench.run("--rehearse", "--config", "probe.yaml", *words, "--", bench.recipe(RECIPE))
    assert (done.returncode, bench.called()) == (2, [])
    assert "already holds a run; accepted: another --output DIR" in done.stderr


def test_an_environment_without_torch_is_named(bench, checkout):
    (bench.folder / "site").mkdir()
    hidden = "import importlib.util as u\nold = u.find_spec\n"
    hidden += "u.find_spec = lambda name, *a: None if name == 'torch' else old(name, *a)\n"
    (bench.folder / "site/sitecustomize.py").write_text(hidden)
    words = ("--rehearse", "--config", "probe.yaml", "--", bench.recipe(RECIPE))
    done = bench.run(*words, PYTHONPATH=str(bench.folder / "site"))
    assert (done.returncode, bench.called()) == (2, [])
    assert "torch is not installed in" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_machine_with_torch_npu_is_refused(bench, checkout):
    (bench.folder / "site/torch_npu").mkdir(parents=True)
    (bench.folder / "site/torch_npu/__init__.py").touch()
    words = ("--rehearse", "--config", "probe.yaml", "--", bench.recipe(RECIPE))
    done = bench.run(*words, PYTHONPATH=str(bench.folder / "site"))
    assert (done.returncode, bench.called()) == (2, [])
    assert "is for machines without accelerator, but torch_npu is installed in" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("device", "usable", "refused"), [("nvidia0", True, True), ("nvidia0", False, False)])
def test_a_machine_with_cuda_is_refused(tmp_path, monkeypatch, device, usable, refused):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a card")
    assert accelerator(tmp_path) is None
    (tmp_path / device).touch()
    found = accelerator(tmp_path)
    assert (found is not None and found.endswith("can use a card")) is refused


def test_numbers_of_processes():
    assert ranks_of("64") == 64
    for text in ("65", "-1", "2.0", ""):
        with pytest.raises(ConfigError, match="accepted: 1 to 64"):
            ranks_of(text)


@pytest.mark.parametrize("script", ["trainer.py", "posttrain_gpt.py", "train_fsdp2.py"])
def test_what_cannot_be_rehearsed_is_one_sentence(tmp_path, script):
    with pytest.raises(ConfigError, match=rf"--rehearse: {script}: .*; accepted: a recipe that starts pretrain_gpt.py"):
        rehearse(Launch((), script, ("--num-layers", "2")), [], 2, "modellink", tmp_path)


def test_tuning_is_rehearsed_on_mock_data_of_pre_training(tmp_path):
    words = "--num-layers 2 --lora-r 16 --is-instruction-dataset --variable-seq-lengths --prompt-type qwen --finetune"
    small = rehearse(Launch((), "pretrain_gpt.py", tuple(words.split())), [], 2, "modellink", tmp_path)
    names = {flag.name for flag in flags_of(small.launch.arguments)}
    assert names >= {"lora-r", "mock-data"}
    assert not names & {"is-instruction-dataset", "variable-seq-lengths", "prompt-type", "finetune"}
    assert any("tuning data" in line and "--is-instruction-dataset" in line for line in small.said)


@pytest.mark.parametrize(("kind", "ends"), [("group_limited_greedy", True), ("aux_loss", False)])
def test_a_router_that_cannot_evaluate_ends_before_it(tmp_path, kind, ends):
    words = f"--num-layers 2 --moe-router-load-balancing-type {kind} --output-layer-slice-num 10"
    small = rehearse(Launch((), "pretrain_gpt.py", tuple(words.split())), [], 2, "modellink", tmp_path)
    flags = flags_of(small.launch.arguments)
    assert (Flag("exit-interval", ("5",)) in flags) == ends
    assert "output-layer-slice-num" not in {flag.name for flag in flags}
