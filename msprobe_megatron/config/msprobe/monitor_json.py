"""Translation of the settings of msprobe's training monitor into the ``monitor`` section.

There are two generations of the file: the first had only ``targets`` and ``module_ranks`` and monitored activations,
gradients and optimizer state; the later one enables each kind with a key of its own. The file of the rewritten monitor
(``monitors``) is recognised and refused as a whole.
"""

from collections.abc import Callable, Collection

from msprobe_megatron.config.document import Node, shown
from msprobe_megatron.config.msprobe.translation import Always, Draft, Refuse, Table, To, Via, apply_table, refusal
from msprobe_megatron.config.sections.top import ProbeConfig

_KINDS = {
    "xy_distribution": "activations",
    "wg_distribution": "gradients",
    "mv_distribution": "optimizer",
    "param_distribution": "parameters",
}
_OPS = ("norm", "min", "max", "mean", "zeros", "nans", "id", "shape", "dtype")
_WINDOW = ("start_step", "step_interval", "collect_times")
_FEATURES = ("l2_targets", "recording_l2_features")
_METRICS = {
    "attention_hook": "attention",
    "linear_hook": "stable_rank",
    "moe_router_weight_hook": "router",
    "moe_router_logit_hook": "router",
}


def is_monitor_file(keys: Collection[str]) -> bool:
    """Whether these top-level keys are those of a monitor file."""
    return any(key in MONITOR for key in keys)


def translate_monitor(root: Node) -> Draft:
    """The translation of a monitor file."""
    draft = Draft()
    keys = root.mapping()
    draft.origins["monitor"] = "/".join(_KINDS)
    first_generation = not any(key in keys for key in (*_KINDS, "cc_distribution"))
    for key, kind in _KINDS.items():
        draft.put(f"monitor.{kind}", first_generation and kind != "parameters", key)
    if first_generation:
        draft.note("targets", "no *_distribution key: activations, gradients and optimizer state are monitored")
    apply_table(draft, root, MONITOR, skip=(*_WINDOW, *_FEATURES))
    _features(draft, {key: node for key in _FEATURES if (node := keys.get(key)) is not None and node.value is not None})
    _window(
        draft,
        {key: node for key in _WINDOW if (node := keys.get(key)) is not None and node.value is not None},
    )
    draft.note("output", f"no such key; the default of the kit is {ProbeConfig().output}, see --msprobe-output")
    return draft


def _window(draft: Draft, given: dict[str, Node]) -> None:
    """Start, interval and number of collections; msprobe writes 10**8 for no limit."""
    bounds = {"start_step": (0, "start_step"), "step_interval": (1, "every"), "collect_times": (1, "collect_times")}
    for key, node in given.items():
        low, ours = bounds[key]
        number = node.integer(low, 10**8)
        if key != "collect_times" or number < 10**8:
            draft.put(f"monitor.{ours}", number, key)


def _features(draft: Draft, given: dict[str, Node]) -> None:
    """Metrics are requested by their hooks, and only if recording them is enabled."""
    if "recording_l2_features" not in given or not given["recording_l2_features"].boolean():
        for key, node in given.items():
            draft.note(key, f"{shown(node.value)} has no effect")
        return
    hooks = given["l2_targets"].entries(_METRICS) if "l2_targets" in given else {}
    if not hooks:
        draft.note("recording_l2_features", "l2_targets names no hook: nothing is recorded")
        return
    for hook in hooks.values():
        hook.items("a list of names of modules; [] is all")
    draft.put("monitor.metrics", list(dict.fromkeys(_METRICS[key] for key in hooks)), "l2_targets")
    draft.note("l2_targets", "metrics are those of all modules that the targets choose")


def _targets(draft: Draft, node: Node) -> None:
    for name, child in node.mapping("a mapping from module names to {input: tensor, …}").items():
        head, colon, rest = name.partition(":")
        if colon and head.isdigit():
            raise refusal(child, f"layers are numbered over the whole model, not by chunk; write {rest} so numbered")
    draft.put("monitor.targets", node.value, node.path)


def _module_ranks(draft: Draft, node: Node) -> None:
    if isinstance(node.value, str):
        # The first generation wrote "0,1"; empty text is every rank.
        draft.put("ranks", node.value.strip() or "all", node.path)
    else:
        node.items("a list of ranks; [] is all")
        draft.put("ranks", node.value or "all", node.path)


def _all_modules(draft: Draft, node: Node) -> None:
    if node.boolean() and draft.document["monitor"].get("targets"):
        raise refusal(node, "targets select modules and parameters alike; write targets: {} for all of them")
    draft.note(node.path, "empty targets are all modules")


def _only(direction: str) -> Callable[[Draft, Node], None]:
    def read(draft: Draft, node: Node) -> None:
        if not node.boolean():
            return
        if draft.document["monitor"].get("direction", direction) != direction:
            raise refusal(node, "forward_only and backward_only together collect nothing; leave one out")
        draft.put("monitor.direction", direction, node.path)

    return read


def _collectives(draft: Draft, node: Node) -> None:
    # The switch is off if it is missing.
    draft.put("monitor.comm", False, node.path)
    apply_table(draft, node, COLLECTIVES)


def _alert(draft: Draft, node: Node) -> None:
    apply_table(draft, node, ALERT)


def _rules(draft: Draft, node: Node) -> None:
    rules: list[object] = []
    for item in node.items("a list of rules"):
        fields = item.entries(("rule_name", "args"))
        if "rule_name" not in fields:
            raise item.error("has no rule_name", ", ".join(RULES))
        rule = fields["rule_name"].choice(tuple(RULES))
        arguments = fields["args"].entries(("threshold",)) if "args" in fields else {}
        threshold = arguments["threshold"].positive_number() if "threshold" in arguments else None
        if rule == "AnomalyTurbulence" and threshold is None:
            raise item.error("has no threshold", "args: {threshold: 0.5}")
        if rule == "AnomalyNan":
            rules.append("nonfinite")
        if threshold is not None:
            rules.append({"rule": RULES[rule], "threshold": threshold})
    draft.put("monitor.alerts", rules, node.path)


def _format(draft: Draft, node: Node) -> None:
    name = node.choice(("csv", "tensorboard", "api"))
    if name == "api":
        raise refusal(node, "something must be written; leave it out and read the Parquet files")
    draft.put("monitor.format", ["parquet"] if name == "csv" else ["parquet", "tensorboard"], node.path)
    if name == "csv":
        draft.note(node.path, "csv is made from the Parquet files by msprobe-megatron export RUN --format monitor-csv")


def _ops(node: Node) -> object:
    return [item.choice(_OPS) for item in node.items(f"a list of {', '.join(_OPS)}")]


def _bool(node: Node) -> object:
    return node.boolean()


# The rule that a threshold applies to; AnomalyNan is also the rule nonfinite.
RULES = {"AnomalyTurbulence": "spike", "AnomalyNan": "limit"}
ALERT: Table = {
    "rules": Via(_rules),
    "dump": Always("alerts are always written, to events.jsonl", _bool),
    "inform": Refuse("no one is notified; leave it out and read events.jsonl, or write an action for the alert", ({},)),
}
COLLECTIVES: Table = {
    "enable": To("monitor.comm"),
    "cc_codeline": Refuse("collectives are identified by group and site, not by source line; leave it out", ([],)),
    "cc_pre_hook": Always("what goes into collectives is recorded like what comes out", _bool),
    "cc_log_only": Refuse("training is never stopped to list call sites; leave it out", (False,)),
}
MONITOR: Table = {
    "targets": Via(_targets),
    "module_ranks": Via(_module_ranks),
    **{key: To(f"monitor.{kind}") for key, kind in _KINDS.items()},
    "all_xy": Via(_all_modules),
    "forward_only": Via(_only("forward")),
    "backward_only": Via(_only("backward")),
    "monitor_mbs_grad": To("monitor.microbatch_gradients"),
    "ur_distribution": To("monitor.update"),
    "mg_direction": To("monitor.agreement"),
    "mg_distribution": To("monitor.agreement"),
    "cc_distribution": Via(_collectives),
    "alert": Via(_alert),
    "ops": Always("all statistics are always recorded", _ops),
    "eps": Refuse("zeros are counted exactly; leave it out", (1e-8,)),
    "ndigits": Always("numbers are written in full", lambda node: node.integer(0, 20)),
    **{key: Via(lambda draft, node: None) for key in _WINDOW},  # read together, by _window
    "step_count_per_record": Always("the kit chooses the length of its files", lambda node: node.integer(1, 10**6)),
    "dynamic_on": Always("switch it while the job runs: msprobe-megatron ctl RUN --monitor on|off", _bool),
    "format": Via(_format),
    "print_struct": Refuse("training is never stopped for it; write dump: {task: structure}", (False,)),
    "stack_info": Refuse("the monitor keeps no stacks; write dump: {stacks: true}", (False,)),
    "squash_name": Always("names are always canonical", _bool),
    "append_output": Refuse("a run directory holds one run; leave it out", ([],)),
    **{key: Via(lambda draft, node: None) for key in _FEATURES},  # read together, by _features
    "sa_order": Refuse("queries and keys are taken as Megatron has them; leave it out", ("s,b,h,d",)),
    "params_effrank": Refuse("ranks by SVD are not computed; write l2_targets: {linear_hook: []}", (False, [], {}, "")),
    "monitors": Refuse("the file of the rewritten monitor is not read; write monitor: {activations: true, …}"),
}
