"""Translation of msprobe's config.json (PyTorch) into a probe file.

The tables below hold the whole schema of msprobe over its versions: common keys first, then the block of each task. As
in msprobe, blocks of other tasks than the chosen one are not read, and a note says so. ``monitor_json`` translates the
file of the monitor.
"""

import re

from msprobe_megatron.config.document import Node
from msprobe_megatron.config.keys import keys_of
from msprobe_megatron.config.msprobe.monitor_json import is_monitor_file, translate_monitor
from msprobe_megatron.config.msprobe.translation import Always, Draft, Refuse, Table, To, Via, apply_table, refusal
from msprobe_megatron.config.sections.dump import LEVELS
from msprobe_megatron.config.sections.top import ProbeConfig

PROBE_FILE_KEYS = tuple(keys_of(ProbeConfig))
_PREFIXES = "Distributed|Functional|Torch|Tensor|Mint|MintFunctional|Primitive|Aten|VF|NPU|Jit|MindSpeed|Triton"
_API_CALL = re.compile(rf"(?:{_PREFIXES})\.(\w+)\.[0-9]+(?:\.\w+)*")
# Module.<chunk>.<wrappers><path>.<Class>.<direction>.<call>; everything but the path may be missing.
_MODULE_CALL = re.compile(
    r"(?:Module|Cell)\.(?:[0-9]+\.)?(?:module\.)*(.+?)(?:\.[A-Z]\w*)?(?:\.(?:forward|backward)(?:\.[0-9]+)?)?"
)


def translate(root: Node) -> Draft | None:
    """The translation of a file of msprobe, or None for any other file.

    A file with any top-level key of the probe file is a probe file; otherwise a known key of msprobe decides.
    """
    keys = root.mapping()
    if any(key in PROBE_FILE_KEYS for key in keys):
        return None
    if is_monitor_file(keys):
        return translate_monitor(root)
    return _translate_dump(root) if any(key in COMMON or key in BLOCKS for key in keys) else None


def _translate_dump(root: Node) -> Draft:
    draft = Draft()
    keys = root.mapping()
    task = keys.get("task", Node("statistics", "task", root.context))
    if task.value is None:
        task = Node("statistics", "task", root.context)
    name = task.choice(tuple(TASKS))
    TASKS[name].apply(draft, task)
    apply_table(draft, root, COMMON, skip=("task", "level", *BLOCKS))
    if "dump_enable" in keys and keys["dump_enable"].value is False:
        draft.put("steps", "none", "dump_enable")
    _level(draft, keys.get("level"), root, name)
    for key, table in BLOCKS.items():
        if key not in keys or keys[key].value is None:
            continue
        if key == name:
            apply_table(draft, keys[key], table)
        else:
            keys[key].mapping()
            draft.note(key, f"block not used, task is {name}")
    if "output" not in draft.document:
        draft.note("dump_path", f"not written; the default of the kit is {ProbeConfig().output}")
    return draft


def _level(draft: Draft, node: Node | None, root: Node, task: str) -> None:
    written = node is not None and node.value is not None
    level = node if node is not None and written else Node("L1", "level", root.context)
    if level.value == "L2":
        raise refusal(level, "device kernels are not recorded; write L0 (modules) or L1 (API calls)")
    level.choice(LEVELS)
    if task == "grad_probe":
        draft.note("level", "the monitor has no levels")
    elif task == "free_benchmark":
        if level.value != "L1":
            raise refusal(level, "operators are run again at the level of API calls; write L1 or leave it out")
    elif task == "structure" and level.value not in ("L0", "mix"):
        draft.put("dump.level", "mix", "level")
        draft.note("level", "task structure works at L0 or mix; mix is taken, as in msprobe")
    else:
        draft.put("dump.level", level.value, "level")
        if not written:
            draft.note("level", "not written; L1 is taken, as in msprobe")


def _dump_task(task: str) -> Via:
    return Via(lambda draft, node: draft.put("dump.task", task, node.path))


def _perturb_task(draft: Draft, node: Node) -> None:
    draft.put("perturb.profile", "msprobe", node.path)
    draft.origins["perturb"] = "task"


def _grad_task(draft: Draft, node: Node) -> None:
    for what in ("activations", "optimizer"):
        draft.put(f"monitor.{what}", False, node.path)
    draft.put("monitor.gradients", True, node.path)
    draft.origins["monitor"] = "task"


def _numbers(target: str) -> Via:
    def read(draft: Draft, node: Node) -> None:
        node.items('a list of numbers and ranges such as [0, "4-6"]; [] is all')
        draft.put(target, node.value or "all", node.path)

    return Via(read)


def _names(target: str) -> Via:
    def read(draft: Draft, node: Node) -> None:
        draft.put(target, [_name(draft, item) for item in node.items("a list of names")], node.path)

    return Via(read)


def _name(draft: Draft, node: Node) -> str:
    text = node.text()
    if text.startswith("name-regex(") and text.endswith(")"):
        return f"/{text[len('name-regex(') : -1]}/"
    call = _API_CALL.fullmatch(text)
    if call is not None:
        raise refusal(node, f"calls have no running numbers here; write {call[1]}")
    module = _MODULE_CALL.fullmatch(text)
    if module is None:
        return text
    draft.note(node.path, f"{text} is taken as {module[1]}: class, direction and call number are dropped")
    return module[1]


def _data_mode(draft: Draft, node: Node) -> None:
    # msprobe reads an empty list as everything.
    draft.put("dump.data_mode", node.items("a list such as [all]") and node.value or ["all"], node.path)


def _summary_mode(draft: Draft, node: Node) -> None:
    mode = node.choice(("statistics", "md5", "xor"))
    draft.put("dump.digest", {"statistics": False, "md5": "crc32", "xor": True}[mode], node.path)
    if mode == "md5":
        draft.note(node.path, "md5 is taken as digest: crc32, which is what msprobe computes under that name")
    if mode == "xor":
        draft.note(node.path, "xor is taken as digest: true, which also sees moved values; not msprobe's number")


def _dump_enable(draft: Draft, node: Node) -> None:
    # false waits for a control order; `_translate_dump` makes sure that `step` does not override this.
    draft.note(node.path, "a running job is switched with msprobe-megatron ctl RUN, not by changing this file")
    if not node.boolean():
        draft.put("steps", "none", node.path)


def _risk_level(draft: Draft, node: Node) -> None:
    draft.put("dump.apis", node.choice(("ALL", "CORE", "FOCUS")).lower(), node.path)
    draft.note(node.path, "what each preset leaves out stands in docs/dump.md; it is not msprobe's list to the letter")


def _fuzz_device(draft: Draft, node: Node) -> None:
    device = node.choice(("npu", "cpu"))
    if device == "cpu":
        draft.put("perturb.device", device, node.path)
    else:
        draft.note(node.path, f"{device}: the device follows from pert_mode; only to_cpu runs on the host")


def _grad_names(draft: Draft, node: Node) -> None:
    names = [item.text() for item in node.items("a list of parameter names")]
    draft.put("monitor.targets", {name: {} for name in names}, node.path)


def _bool(node: Node) -> bool:
    return node.boolean()


def _text_list(node: Node) -> list[str]:
    return [item.text() for item in node.items()]


_OFFLINE = Refuse("the offline checker is another program; write perturb: {mode: improve_precision, handler: check}")
_ONLINE = Refuse("nothing is sent to another host; write steps, then run msprobe-megatron compare", (False, "", []))
_DIFF = Refuse("runs are compared afterwards; write dump: {digest: true}, then msprobe-megatron compare GOLDEN RUN")

TASKS: Table = {
    "statistics": _dump_task("statistics"),
    "tensor": _dump_task("tensor"),
    "structure": _dump_task("structure"),
    "overflow_check": _dump_task("nonfinite"),
    "free_benchmark": Via(_perturb_task),
    "grad_probe": Via(_grad_task),
    "acc_check": _OFFLINE,
    "run_ut": _OFFLINE,
    "diff_check": _DIFF,
    "nan_check": Refuse("no device register is read; write dump: {task: nonfinite}"),
    "exception_dump": Refuse("it belongs to MindSpore; write dump: {task: nonfinite}"),
    "nan_analyze": Refuse("it is a command, not a task; record first, then run msprobe-megatron diagnose RUN"),
}
COMMON: Table = {
    "task": Via(lambda draft, node: None),  # read first, by TASKS
    "level": Via(lambda draft, node: None),  # read last, by _level
    "dump_path": To("output"),
    "rank": _numbers("ranks"),
    "step": _numbers("steps"),
    "extra_info": To("dump.stacks"),
    "async_dump": Always("the writer is always asynchronous", _bool),
    "precision": Always("sums are always in float32 or wider", lambda node: node.choice(("low", "high"))),
    "dump_enable": Via(_dump_enable),
    "risk_level": Via(_risk_level),
    "custom_op_namespaces": Always("operators of torch.ops are seen in every namespace", _text_list),
    "load": Refuse("module inputs are not replayed from an earlier dump; leave it out"),
    "enable_dataloader": Refuse("steps are those of the optimizer; leave it out", (False,)),
    "seed": Refuse("the probe never touches random numbers; write --seed among the training arguments"),
    "is_deterministic": Refuse("the probe never changes kernels; write --deterministic-mode for Megatron", (False,)),
    "acl_config": Refuse("device kernels are not recorded; leave it out", ("",)),
    "hook_name": Refuse("it belongs to the oldest interface; write task"),
}
_FILTERS: Table = {
    "scope": _names("dump.scope"),
    "list": _names("dump.list"),
    "data_mode": Via(_data_mode),
}
_VALUES: Table = {
    **_FILTERS,
    "summary_mode": Via(_summary_mode),
    "slice": To("dump.slice"),
    "request_id": Refuse("it belongs to inference; leave it out", ("",)),
    "file_format": Refuse("tensors are packed as safetensors; leave it out", ("npy",)),
    "backward_input": Refuse("backward is observed where it runs, from no saved input; leave it out", ([],)),
    "diff_nums": _DIFF,
    "bench_path": _DIFF,
    "online_run_ut": _ONLINE,
    "online_run_ut_recompute": _ONLINE,
    "nfs_path": _ONLINE,
    "host": _ONLINE,
    "port": _ONLINE,
    "tls_path": _ONLINE,
}
BLOCKS: dict[str, Table] = {
    "statistics": {
        **_VALUES,
        "tensor_list": _names("dump.tensor_list"),
    },
    "tensor": _VALUES,
    "structure": {key: Refuse("the structure is written whole; leave it out", ([], ["all"])) for key in _FILTERS},
    "overflow_check": {
        **_FILTERS,
        "overflow_nums": Refuse("every operator with NaN or Inf is recorded; write -1 and choose the steps", (-1,)),
        "check_mode": Refuse("values are looked at, not device flags; write all", ("all",)),
    },
    "free_benchmark": {
        "scope": To("perturb.scope"),
        "list": To("perturb.list"),
        "fuzz_device": Via(_fuzz_device),
        "pert_mode": To("perturb.mode"),
        "handler_type": To("perturb.handler"),
        "fuzz_level": Always("all columns are written", lambda node: node.choice(("L1",))),
        "fuzz_stage": To("perturb.stage"),
        "if_preheat": To("perturb.preheat"),
        "preheat_step": To("perturb.preheat_steps"),
        "max_sample": To("perturb.max_samples"),
    },
    "grad_probe": {
        "grad_level": Refuse("arrays of signs are not written; write L0, which is statistics", ("L0",)),
        "param_list": Via(_grad_names),
        "bounds": Refuse("there are no histograms of gradients; leave it out", ([],)),
    },
    # The blocks below stand in the file that msprobe ships; their tasks are refused above.
    **{key: {} for key in ("acc_check", "run_ut", "diff_check", "nan_check", "exception_dump", "nan_analyze")},
}
