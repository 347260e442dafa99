"""The --msprobe-* flags, in the host's parser and in the kit's own reading of the command line."""

import argparse
from pathlib import Path

import pytest

from msprobe_megatron.config import ConfigError
from msprobe_megatron.config.flags import FLAGS, Flags, add_arguments, from_command_line, from_namespace

HOST = ["--num-layers", "2", "--lr", "-1e-4", "-x", "positional", "--fp16", "--split", "949,50,1"]


def read(*argv, **environ):
    return from_command_line(argv, environ)


def test_nothing_given():
    assert read(*HOST) == Flags(config=None, output=None, device="auto", steps=None, strict=None)
    assert not read(*HOST).armed


@pytest.mark.parametrize("joined", [True, False])
def test_every_flag_among_those_of_the_host(joined):
    given = {
        "--msprobe-config": "p.yaml",
        "--msprobe-output": "o",
        "--msprobe-device": "cpu",
        "--msprobe-steps": "0,5-7",
    }
    argv = []
    for flag, value in given.items():
        argv += [f"{flag}={value}"] if joined else [flag, value]
    flags = read(*HOST[:4], *argv, *HOST[4:], "--msprobe-strict")
    assert flags == Flags(config="p.yaml", output="o", device="cpu", steps="0,5-7", strict=True)
    assert flags.armed


def test_every_flag_is_a_field():
    assert {flag.removeprefix("--msprobe-") for flag in FLAGS} == set(Flags.__dataclass_fields__)


def test_last_wins():
    assert read("--msprobe-config=a", *HOST, "--msprobe-config", "b").config == "b"


def test_environment_is_the_default_of_config_and_output():
    environ = {
        "MSPROBE_CONFIG": "e.yaml",
        "MSPROBE_OUTPUT": "e_out",
        "MSPROBE_STEPS": "3",
        "MSPROBE_DEVICE": "npu",
    }
    assert read(**environ) == Flags(config="e.yaml", output="e_out")
    assert read("--msprobe-config", "f.yaml", **environ) == Flags(config="f.yaml", output="e_out")
    assert not read(MSPROBE_CONFIG="", MSPROBE_OUTPUT="").armed
    # Read at the call, not at import.
    assert from_command_line([], {"MSPROBE_CONFIG": "x"}).config == "x"


def test_real_command_line_and_environment(monkeypatch):
    monkeypatch.setattr("sys.argv", ["pretrain.py", "--msprobe-steps", "4"])
    monkeypatch.setenv("MSPROBE_CONFIG", "real.yaml")
    monkeypatch.delenv("MSPROBE_OUTPUT", raising=False)
    assert from_command_line() == Flags(config="real.yaml", steps="4")
    assert from_namespace(argparse.Namespace()) == Flags(config="real.yaml")


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--msprobe-conf", "x"], ["--msprobe-conf: unknown flag", "--msprobe-config"]),
        (["--msprobe-confg=x"], ["--msprobe-confg: unknown flag"]),
        (["--msprobe-config"], ["--msprobe-config", "expected one argument"]),
        (["--msprobe-config", "--fp16"], ["--msprobe-config", "expected one argument"]),
        (["--msprobe-config="], ["--msprobe-config: '' is empty"]),
        (["--msprobe-config", ""], ["--msprobe-config: '' is empty"]),
        (["--msprobe-steps", ""], ["--msprobe-steps: '' is empty"]),
        (["--msprobe-device", "tpu"], ["--msprobe-device", "tpu", "auto", "cuda"]),
        (["--msprobe-strict=1"], ["--msprobe-strict"]),
    ],
)
def test_refused(argv, parts):
    with pytest.raises(ConfigError) as caught:
        read(*HOST, *argv)
    message = str(caught.value)
    assert message.startswith("command line: ")
    assert len(message.splitlines()) == 1
    for part in parts:
        assert part in message


def test_what_follows_a_double_dash_is_not_flags():
    assert read("--msprobe-steps=1", "--", "--msprobe-config", "x", "--msprobe-nonsense") == Flags(steps="1")


def test_added_to_a_parser_twice():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--num-layers", type=int)
    assert add_arguments(add_arguments(parser)) is parser
    args = parser.parse_args(["--num-layers", "2", "--msprobe-config", "p.yaml", "--msprobe-strict"])
    assert (args.num_layers, args.msprobe_config, args.msprobe_strict) == (2, "p.yaml", True)
    assert from_namespace(args, {}) == Flags(config="p.yaml", strict=True)
    text = parser.format_help()
    assert text.count("msprobe:\n") == 1
    for flag in FLAGS:
        assert text.count(f"  {flag}") == 1


def test_parser_that_resolves_conflicts():
    parser = argparse.ArgumentParser(conflict_handler="resolve")
    add_arguments(add_arguments(parser))
    assert parser.parse_args(["--msprobe-steps", "1"]).msprobe_steps == "1"
    assert parser.format_help().count("msprobe:\n") == 1


def test_two_parsers():
    for _ in range(2):
        args = add_arguments(argparse.ArgumentParser()).parse_args([])
        assert from_namespace(args, {}) == Flags()


def test_namespace_of_a_host_without_the_flags():
    assert from_namespace(argparse.Namespace(lr=1.0), {}) == Flags()


def test_load_config(tmp_path):
    path = tmp_path / "probe.yaml"
    path.write_text("output: from_file\nsteps: [1]\ndump: {}")
    config = read("--msprobe-config", str(path)).load_config()
    assert (config.output, config.steps.describe(), config.strict) == (Path("from_file"), "1", False)
    flags = read("--msprobe-config", str(path), "--msprobe-steps", "5-6", "--msprobe-strict", MSPROBE_OUTPUT="env_out")
    config = flags.load_config()
    assert (config.output, config.steps.describe(), config.strict) == (Path("env_out"), "5-6", True)


def test_load_config_when_not_armed():
    with pytest.raises(ConfigError, match=r"--msprobe-config: no probe file is named; accepted: .*MSPROBE_CONFIG"):
        Flags().load_config()


def test_wrong_steps_are_found_when_the_file_is_loaded(tmp_path):
    path = tmp_path / "probe.yaml"
    path.write_text("dump: {}")
    with pytest.raises(ConfigError, match="^command line: --msprobe-steps: 'x' is not"):
        Flags(config=str(path), steps="x").load_config()
