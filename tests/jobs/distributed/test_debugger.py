"""`PrecisionDebugger` in a Megatron job: steps are its own, microbatches and stages are the schedule's."""

import json

from msprobe_megatron.analysis.load.run import open_run
from tests.jobs.distributed.layouts import LAYOUTS, flags_of
from tests.jobs.distributed.test_bit_exact import same
from tests.support.forked import run_forked


def train(config, argv):
    from msprobe_megatron import PrecisionDebugger
    from msprobe_megatron.lab.demo.pretrain_gpt import run
    from msprobe_megatron.lab.demo.train import Callbacks

    debugger = PrecisionDebugger(config_path=config)
    debugger.set_init_step(10)
    chunks_seen = []

    def ready(chunks, optimizer):
        chunks_seen.extend(chunks)
        debugger.start(chunks)

    def after(step):
        debugger.stop()
        debugger.step()
        debugger.start(chunks_seen)

    result = run(argv, Callbacks(ready=ready, step=after))
    PrecisionDebugger.close()
    return {"losses": result.losses, "parameters": [p.detach().clone() for c in result.chunks for p in c.parameters()]}


def test_microbatches_and_stages_are_those_of_the_schedule(jobs, tmp_path):
    config = {"task": "statistics", "dump_path": str(tmp_path / "out"), "level": "mix", "step": [11]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = run_forked(LAYOUTS["pp2"].world, train, str(tmp_path / "config.json"), flags_of("pp2", dropout=True))
    run = open_run(tmp_path / "out")
    assert run.steps == [11] and all(facts["ledger"]["faults"] == [] for facts in run.ranks.values())
    rows = run.rows().filter("name like 'decoder.layers.%' and kind = 'activation'")
    assert sorted(rows.project("rank, microbatch").distinct().fetchall()) == [(r, m) for r in (0, 1) for m in range(4)]
    assert run.rows().filter("kind = 'grad_reduced'").fetchall()
    for plain, probed in zip(jobs.plain("pp2"), found, strict=True):
        assert same(plain["losses"], probed["losses"])
        assert same(list(plain["parameters"].values()), probed["parameters"])
