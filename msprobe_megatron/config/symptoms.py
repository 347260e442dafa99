"""Probe files to start from, by what is wrong with a job: the text of `msprobe-megatron init SYMPTOM`.

They are those of docs/walkthroughs.md, fit for a real job. ``{run}`` is where the run goes.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Symptom:
    """A symptom: what is seen, the commented probe file, and the commands that come after the job."""

    seen: str
    text: str
    then: tuple[str, ...]


SYMPTOMS: dict[str, Symptom] = {
    "nan": Symptom(
        "the loss is NaN, or Megatron stops because of one",
        """\
output: {run}
# The last steps stay in memory and are written by all ranks when something goes non-finite on one, when training ends
# by an exception, or on a signal. Costs a recording of modules at every step: take it out when the NaN is found.
recorder:
  keep_steps: 4
# From the log: the first NaN of a loss, a gradient or a weight is told at its own step, not when the loss shows it.
monitor:
  activations: false
  optimizer: false
  alerts: [nonfinite]
""",
        ("msprobe-megatron diagnose {run}", "msprobe-megatron report {run}"),
    ),
    "spike": Symptom(
        "the loss or the gradient norm jumps",
        """\
output: {run}
# No step of its own: the alert below asks for some.
steps: none
dump: {{level: L0}}
monitor:
  # Loss, gradient norm and gradients of every step; cheap enough for the whole job.
  activations: false
  gradients: true
  optimizer: false
  # Digests of token ids: two spikes on the same samples are the data's, not the model's.
  data: true
  alerts:
    - rule: spike
      # What the spike triggers: modules of the next two steps, while it lasts.
      action: {{record: 2, level: L0}}
    - nonfinite
""",
        ("msprobe-megatron watch {run}", "msprobe-megatron diagnose {run}"),
    ),
    "which-layer": Symptom(
        "something jumps, and the layer that starts it is wanted",
        """\
output: {run}
monitor:
  # Every module of every layer, forward and backward; every: 10 is enough for what lasts.
  every: 1
  microbatches: summed
  activations: true
  gradients: true
  optimizer: false
  alerts:
    - {{rule: spike, kinds: [activation, gradient, grad_reduced, loss]}}
    - nonfinite
# The steps before the alert, of all ranks, in full detail.
recorder:
  keep_steps: 2
  on: [nonfinite, alert]
""",
        ("msprobe-megatron diagnose {run}", "msprobe-megatron report {run}"),
    ),
    "mismatch": Symptom(
        "two layouts, machines or versions do not agree on the first loss",
        """\
output: {run}
# The first steps of both jobs, with the same weights, the same data and dropout off.
steps: [0, 1]
dump:
  level: L0
  # 256 numbers of each tensor: compares element by element without writing tensors.
  sketch: 256
""",
        ("msprobe-megatron env-diff OTHER_RUN {run}", "msprobe-megatron compare OTHER_RUN {run}"),
    ),
    "drift": Symptom(
        "the job is slowly worse than it should be, without an alarm",
        """\
output: {run}
# Ranks that ought to hold the same weights, gradients, moments and random states compare 64-bit digests through the
# job's own store; no collective is added.
checks:
  every: 100
monitor:
  every: 100
  activations: false
  # How far each weight moves, and whether gradient and momentum agree.
  update: true
""",
        ("msprobe-megatron diagnose {run}", "msprobe-megatron report {run}"),
    ),
    "unstable": Symptom(
        "the same job twice gives different numbers",
        """\
output: {run}
# Run the job twice, each time into another directory (--msprobe-output), then compare: what parts first is not
# deterministic. Digests find a difference of one bit.
steps: [0, 1]
dump:
  level: mix
  digest: true
""",
        ("msprobe-megatron compare {run} SECOND_RUN",),
    ),
    "slow": Symptom(
        "steps take longer than they should, or ranks wait for each other",
        """\
output: {run}
monitor:
  # Seconds, tokens and memory of every step on every rank, and what collectives carried; no statistics of tensors.
  every: 10
  activations: false
  gradients: false
  optimizer: false
  comm: true
""",
        ("msprobe-megatron scaling {run}", "msprobe-megatron report {run}"),
    ),
}


def probe_text(symptom: str, run: str) -> str:
    """The probe file for a symptom."""
    return SYMPTOMS[symptom].text.format(run=run)
