"""A few lines that say what a probe file will record; printed by ``msprobe-megatron validate FILE``."""

from msprobe_megatron.config.reproduce import ReproduceConfig
from msprobe_megatron.config.schema import ChecksConfig, DumpConfig, MonitorConfig, PerturbConfig, ProbeConfig
from msprobe_megatron.config.sizes import format_size


def describe(config: ProbeConfig) -> str:
    """Return a summary, one line for each thing that will happen.

    Example::

        print(describe(load("probe.yaml")))
        # probe.yaml
        #   steps    10, 20-22
        #   dump     statistics of modules (L0): all data of all names, with stacks
    """
    limits, recorder = config.limits, config.recorder
    lines = {
        "output": str(config.output),
        "ranks": config.ranks.describe(),
        "steps": config.steps.describe(),
        "dump": _dump(config.dump) if config.dump else "",
        "monitor": _monitor(config.monitor) if config.monitor else "",
        "perturb": _perturb(config.perturb) if config.perturb else "",
        "checks": _checks(config.checks) if config.checks is not None else "",
        "recorder": f"last {recorder.keep_steps} steps, on {', '.join(recorder.on)}" if recorder else "",
        "shards": f"{len(config.shards)} specs given: {', '.join(rule.name for rule in config.shards)}"
        if config.shards
        else "",
        "reproduce": _reproduce(config.reproduce) if config.reproduce else "",
        "replay": f"CHANGES TRAINING: {', '.join(config.replay.modules)} get the inputs of {config.replay.run}"
        if config.replay
        else "",
        "limits": f"host memory {format_size(limits.host_memory)}"
        + (f", disk {format_size(limits.disk)}" if limits.disk is not None else ""),
        "faults": "stop the job (strict)" if config.strict else "disarm the probe, training goes on",
    }
    body = [f"  {key:<10}{text}" if len(key) > 8 else f"  {key:<9}{text}" for key, text in lines.items() if text]
    return "\n".join([config.source, *body, *(f"  note     {note}" for note in config.notes)])


def _dump(dump: DumpConfig) -> str:
    what = {"L0": "modules", "L1": "API calls", "mix": "modules and API calls", "debug": "save() calls"}[dump.level]
    extras = [
        f"digest {'sum64' if dump.digest is True else dump.digest}" if dump.digest else "",
        f"sketch of {dump.sketch}" if dump.sketch else "",
        f"microbatches {dump.microbatches.describe()}" if dump.microbatches else "",
        f"layers {dump.layers.describe()}" if dump.layers else "",
        f"from {dump.scope[0]} to {dump.scope[1]}" if dump.scope else "",
        "with stacks" if dump.stacks else "without stacks",
    ]
    names = f"names with {', '.join(dump.list)}" if dump.list else "all names"
    first = f"{dump.task} of {what} ({dump.level}): {'/'.join(dump.data_mode)} data of {names}"
    return ", ".join([first, *filter(None, extras)])


def _monitor(monitor: MonitorConfig) -> str:
    kinds = _switched_on(
        monitor,
        (
            *("activations", "gradients", "clipped", "microbatch_gradients", "optimizer", "master_weights", "update"),
            *("agreement", "parameters", "data", "comm"),
        ),
    )
    kinds += [f"{metric} metrics" for metric in monitor.metrics]
    where = f"{len(monitor.targets)} targets" if monitor.targets else "all modules"
    alerts = [
        alert.rule if alert.threshold is None else f"{alert.rule} {alert.threshold:g}" for alert in monitor.alerts
    ]
    when = f"every {monitor.every} steps" + "".join(
        (
            f" from {monitor.start_step}" if monitor.start_step else "",
            f" of {monitor.window.describe()}" if monitor.window else "",
            f", {monitor.collect_times} times" if monitor.collect_times else "",
        )
    )
    watched = f"{', '.join(kinds)} of {where}, {when}, as {', '.join(monitor.format)}"
    return watched + (f"; alerts: {', '.join(alerts)}" if alerts else "")


def _perturb(perturb: PerturbConfig) -> str:
    names = ", ".join((*perturb.list, *perturb.scope, *perturb.modules)) or "all operators"
    extras = [
        f"layers {perturb.layers.describe()}" if perturb.layers else "",
        f"microbatches {perturb.microbatches.describe()}" if perturb.microbatches else "",
        f"within {perturb.share:.3g} of a step" if perturb.share < 1 else "",
        f"thresholds from {perturb.preheat_steps} steps" if perturb.preheat else "",
    ]
    first = f"{perturb.handler} by {perturb.mode} ({perturb.profile}) in {perturb.stage} of {names}"
    return ", ".join([first, *filter(None, extras)])


def _reproduce(asked: ReproduceConfig) -> str:
    parts = [
        f"seed {asked.seed}" if asked.seed is not None else "",
        {"true": "deterministic kernels", "warn": "deterministic kernels where there are"}.get(asked.deterministic, ""),
        "" if asked.dropout else "dropout off",
        "weights by name" if asked.weights == "by_name" else "",
        "weights moved by one unit in the last place" if asked.noise_run else "",
    ]
    return f"CHANGES TRAINING: {', '.join(filter(None, parts)) or 'nothing'}"


def _switched_on(section: object, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if getattr(section, name, False)]


def _checks(checks: ChecksConfig) -> str:
    names = ", ".join(_switched_on(checks, ("replicas", "optimizer", "rng", "collectives")))
    return f"{names}, every {checks.every} steps"
