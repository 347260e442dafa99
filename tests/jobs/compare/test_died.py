"""A job that dies in its first forward: every command says where and why, and none calls it whole."""

import pytest

from msprobe_megatron.analysis.compare.compare import compare
from msprobe_megatron.analysis.diagnose.summary import warnings
from msprobe_megatron.analysis.load.run import open_run
from msprobe_megatron.cli import main
from tests.jobs.compare.faults import around, named
from tests.jobs.distributed.layouts import flags_of
from tests.support.forked import RankFailed, run_forked


def _train(argv, dies):
    from msprobe_megatron.lab.demo.pretrain_gpt import run
    from msprobe_megatron.lab.demo.train import Callbacks

    def ready(chunks, optimizer):
        def forward(original, *args, **kwargs):
            raise RuntimeError("an illegal memory access was encountered\nand more lines")

        if dies:
            around(named(chunks, "decoder.layers.1.mlp"), forward)

    return run(argv, Callbacks(ready=ready)).losses


@pytest.fixture(scope="module")
def died(tmp_path_factory):
    """A whole run and one that died, both with only step 0 requested."""
    root = tmp_path_factory.mktemp("died")
    (root / "probe.yaml").write_text("steps: [0]\ndump: {level: L0}\n")
    for dies, name in ((False, "whole"), (True, "dead")):
        argv = [*flags_of("single", dropout=False), "--train-iters", "1"]
        argv += ["--msprobe-config", str(root / "probe.yaml"), "--msprobe-output", str(root / name)]
        try:
            run_forked(1, _train, argv, dies)
        except RankFailed:
            assert dies
    return root


def test_the_run_says_where_it_stopped_and_why(died):
    found = warnings(open_run(died / "dead"))
    assert len(found) == 1
    assert found[0].startswith("rank 0: step 0 stopped in microbatch 0 inside decoder.layers.1.mlp (")
    assert "RuntimeError: an illegal memory access was encountered; the rest of the step is missing" in found[0]
    assert warnings(open_run(died / "whole")) == []


@pytest.mark.parametrize("command", ["summary", "diagnose"])
def test_commands_exit_with_1_and_tell(died, command, capsys):
    assert main([command, str(died / "dead")]) == 1
    assert "inside decoder.layers.1.mlp" in " ".join(capsys.readouterr().out.split())
    assert main([command, str(died / "whole")]) == 0


def test_compare_says_that_the_run_holds_no_weights(died):
    result = compare(open_run(died / "whole"), open_run(died / "dead"))
    assert result.verdict == "incomparable"
    assert f"{died / 'dead'} holds no weights of step 0: rank 0: step 0 stopped" in result.reason
    assert result.counts["diverged"] == 0
    assert result.counts["agree"] > 50
