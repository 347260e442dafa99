"""From the arguments of `PrecisionDebugger` to a document of msprobe, which `config_json` then translates.

Two generations: ``config_path, task, dump_path, level, step``, and the oldest ``hook_name, rank`` with
``configure_hook(mode=…, summary_only=…)``.
"""

from collections.abc import Mapping
from typing import Any

from msprobe_megatron.config.document import ConfigError

HOOKS = {"dump": "tensor", "overflow_check": "overflow_check"}
# mode -> the filter that the names in `scope` become.
MODES: dict[str, str | None] = {
    "all": None,
    "api_stack": None,
    "list": "list",
    "stack": "list",
    "range": "scope",
    "api_list": "list",
}
DATA_MODES = ("all", "forward", "backward", "input", "output")


def with_arguments(document: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A document of msprobe with the constructor's arguments applied; None keeps the value of the file."""
    merged = {**document, **{key: value for key, value in given.items() if value is not None}}
    for key in ("step", "rank"):
        value = merged.get(key)
        if isinstance(value, int | str) and not isinstance(value, bool):
            merged[key] = [value]
    return merged


def oldest_form(hook_name: str, dump_path: str | None, rank: Any, step: Any) -> dict[str, Any]:
    """The document of ``PrecisionDebugger(dump_path=…, hook_name="dump", rank=0)``."""
    if hook_name not in HOOKS:
        raise ConfigError(f"PrecisionDebugger: hook_name: {hook_name!r} is not known; accepted: {', '.join(HOOKS)}")
    given = {"dump_path": dump_path, "rank": rank, "step": step}
    return with_arguments({"task": HOOKS[hook_name], "level": "L1", "risk_level": "ALL"}, given)


def configured(
    document: Mapping[str, Any],
    mode: str = "api_stack",
    scope: Any = None,
    api_list: Any = None,
    input_output_mode: Any = None,
    summary_only: bool = False,
    summary_mode: str | None = None,
) -> dict[str, Any]:
    """The document after ``configure_hook``."""

    def refuse(key: str, value: Any, accepted: str) -> ConfigError:
        return ConfigError(f"configure_hook: {key}: {value!r} is not known; accepted: {accepted}")

    if mode not in MODES:
        raise refuse("mode", mode, ", ".join(MODES))
    if not isinstance(summary_only, bool):
        raise refuse("summary_only", summary_only, "True, False")
    names = list(api_list or []) if mode == "api_list" else list(scope or [])
    wanted = list(input_output_mode or ["all"])
    unknown = [word for word in wanted if word not in DATA_MODES]
    if unknown:
        raise refuse("input_output_mode", unknown[0], ", ".join(DATA_MODES))
    block: dict[str, Any] = {"data_mode": wanted}
    filtered_by = MODES[mode]
    if filtered_by is not None:
        if not names:
            raise refuse("scope" if mode != "api_list" else "api_list", names, f"names, because mode is {mode}")
        block[filtered_by] = names
    if summary_mode is not None:
        block["summary_mode"] = summary_mode
    task = "statistics" if summary_only and document.get("task") == "tensor" else str(document.get("task"))
    merged = {key: value for key, value in document.items() if key not in ("tensor", "statistics", "overflow_check")}
    return {**merged, "task": task, task: block}
