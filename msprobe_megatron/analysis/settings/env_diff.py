"""Settings in which two jobs differ: arguments, environment, versions, sources, weights, data; by effect on numerics.

Reads run directories or launch scripts. The table below maps groups of Megatron's arguments to their effect; an
argument in no group is listed with unknown effect, before those that only distribute the work differently.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from msprobe_megatron.analysis.load.run import Run, RunError, open_run
from msprobe_megatron.analysis.settings.contents import contents, differing_weights, digest_text
from msprobe_megatron.analysis.settings.launch_scripts import read_script

# Effect, most important first, and the names that have it. Whole names, by regular expression; the first match counts.
_EFFECTS: tuple[tuple[str, str], ...] = (
    (
        "none",
        r"msprobe_.*|log_.*|.*_log|.*logging.*|tensorboard.*|wandb.*|save.*|timing.*|exit_.*|local_rank|rank|hostname",
    ),
    (
        "none",
        r"num_workers|eval_.*|.*_interval|distributed_timeout.*|mock_data|world_size|check_for_.*|layers_per_chunk|use_mcore_models|practise|inprocess_.*",
    ),
    (
        "model",
        r"num_layers|.*hidden_size|num_attention_heads|kv_channels|.*query_.*|num_experts|.*vocab_size|seq_length",
    ),
    ("model", r"max_position_embeddings|position_embedding.*|rotary.*|normalization|norm_epsilon|swiglu|squared_relu"),
    (
        "model",
        r"make_vocab.*|untie_.*|add_bias_linear|add_qkv_bias|qk_layernorm|.*_dropout|init_method.*|moe_(router|aux|z|ffn|expert_capacity|pad_expert).*",
    ),
    ("model", r"openai_gelu|apply_.*|mtp_.*|window_size|.*_lora.*"),
    (
        "data",
        r"seed|data_path|data_.*_path|split|global_batch_size|rampup.*|tokenizer.*",
    ),
    (
        "data",
        r"reset_.*|eod_.*|train_(iters|samples)|iteration|consumed_.*|load|pretrained_checkpoint|finetune|dataloader.*",
    ),
    (
        "optimizer",
        r"optimizer|lr|lr_.*|min_lr|weight_decay.*|.*_wd_.*|clip_grad|adam_.*|sgd_.*|.*loss_scale.*|hysteresis",
    ),
    (
        "precision",
        r"bf16|fp16|fp8.*|.*_in_fp32|params_dtype|.*dtype|fp32_.*|grad_reduce.*|main_.*_dtype|.*precision_aware.*",
    ),
    (
        "kernels",
        r".*fusion|use_flash_attn|transformer_impl|attention_backend|.*_fused.*|gradient_accumulation.*|deterministic.*|.*persist_.*",
    ),
    (
        "layout",
        r".*parallel.*|.*pipeline.*|ddp_.*|overlap_.*|use_distributed_optimizer|distributed_backend|.*_comm|moe_token.*",
    ),
    ("layout", r"micro_batch_size|num_microbatches|recompute.*|distribute_saved.*|use_cpu_initialization|cp_comm_type"),
)
# Variables of the environment, in the same way.
_VARIABLES: tuple[tuple[str, str], ...] = (
    ("none", r"MASTER_.*|TORCHELASTIC_.*|WORLD_SIZE|NODE_RANK|NNODES|MSPROBE.*|.*_DEBUG.*|.*LOG.*|.*_VISIBLE_DEVICES"),
    ("none", r"CUDA_LAUNCH_BLOCKING|NCCL_SOCKET.*|GLOO_SOCKET.*|HCCL_.*TIMEOUT|HCCL_IF.*|PYTHONHASHSEED|.*CACHE_DIR.*"),
    ("versions", r"LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH|ASCEND_.*HOME.*|CUDA_HOME|CUDA_PATH"),
    ("precision", r"NVIDIA_TF32_OVERRIDE|.*TF32.*|NVTE_.*FP8.*|.*PRECISION.*"),
    ("kernels", r".*"),
)
ORDER = ("model", "weights", "data", "optimizer", "precision", "kernels", "versions", "unknown", "layout", "none")
WORDS = {
    "model": "different model: results cannot be compared",
    "weights": "different initial weights",
    "data": "different samples, or a different order",
    "optimizer": "different updates: equal at the first step only",
    "precision": "different rounding",
    "kernels": "different kernels: rounding differences",
    "versions": "different software: rounding differences or more",
    "unknown": "unknown effect",
    "layout": "different summation order: rounding differences",
    "none": "no effect on the numerics",
}


@dataclass(frozen=True)
class Setting:
    """One setting that differs."""

    name: str
    left: Any
    right: Any
    effect: str


@dataclass(frozen=True)
class EnvDiff:
    """Everything that `msprobe-megatron env-diff` shows, most important first."""

    left: str
    right: str
    settings: list[Setting]

    @property
    def matters(self) -> list[Setting]:
        """Those that can change a number."""
        return [setting for setting in self.settings if setting.effect != "none"]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return asdict(self)


def effect_of(name: str) -> str:
    """What an argument of this name does to the numbers.

    Example::

        >>> effect_of("tensor_model_parallel_size"), effect_of("lr")
        ('layout', 'optimizer')
    """
    return next((effect for effect, pattern in _EFFECTS if re.fullmatch(pattern, name)), "unknown")


def effect_of_variable(name: str) -> str:
    """What a variable of the environment does to the numbers.

    Example::

        >>> effect_of_variable("NCCL_ALGO"), effect_of_variable("NCCL_DEBUG")
        ('kernels', 'none')
    """
    return next(effect for effect, pattern in _VARIABLES if re.fullmatch(pattern, name))


@dataclass(frozen=True)
class Start:
    """How a job was started, from its run directory or from its launch script, which says only what it sets."""

    path: str
    arguments: dict[str, Any]
    environment: dict[str, Any]
    versions: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    run: Run | None = None

    @classmethod
    def of(cls, run: Run) -> Start:
        """From a run directory."""
        facts = run.facts
        arguments = facts.get("arguments") or _effective(facts.get("effective") or {})
        others = {} if arguments else {**facts.get("sizes", {}), **facts.get("recompute", {})}
        sources = {Path(root).name: state for root, state in (facts.get("sources") or {}).items()}
        environment = facts.get("environment") or {}
        return cls(str(run.path), arguments, environment, facts.get("versions") or {}, sources, others, run)

    @classmethod
    def read(cls, path: str) -> Start:
        """From a path: a file is a launch script, a directory a run."""
        if Path(path).is_file():
            script = read_script(Path(path))
            if not script.arguments and not script.environment:
                accepted = "a run directory, or a launch script with --flags or exported variables"
                raise RunError(f"{path}: sets no argument and no variable of the environment; accepted: {accepted}")
            return cls(path, script.arguments, script.environment)
        return cls.of(open_run(path))


def _effective(objects: dict[str, Any]) -> dict[str, Any]:
    """Settings of the configuration objects, where a framework has no training arguments; the model's come first."""
    parts = [objects.get(name) for name in ("optimizer", "ddp", "model")]
    return {key: value for part in parts if isinstance(part, dict) for key, value in part.items()}


def env_diff(left: Run | Start, right: Run | Start) -> EnvDiff:
    """Settings of two jobs that differ, ordered by effect."""
    a, b = (Start.of(side) if isinstance(side, Run) else side for side in (left, right))
    found = _settings(a, b)
    if a.run is not None and b.run is not None:
        found += _sources(a.sources, b.sources)
        found += _contents(a.run, b.run)
    found.sort(key=_importance)
    return EnvDiff(a.path, b.path, found)


def settings_apart(left: Run, right: Run) -> list[Setting]:
    """Settings of two runs that differ and can change a number, ordered by effect; sources and contents left out.

    For a comparison of bits: a setting explains a difference, while an edit of the sources is what one looks for.
    """
    found = _settings(Start.of(left), Start.of(right))
    return sorted((setting for setting in found if setting.effect not in ("none", "data")), key=_importance)


def _importance(setting: Setting) -> tuple[int, str]:
    return ORDER.index(setting.effect), setting.name


def _settings(a: Start, b: Start) -> list[Setting]:
    """Arguments, variables and versions that differ."""
    scripts = a.run is None or b.run is None
    # A script says nothing of what it leaves to defaults.
    both = a.run is None and b.run is None
    lonely = both or not scripts
    found = [
        *(Setting(name, x, y, effect_of(name)) for name, x, y in _different(a.arguments, b.arguments, scripts, lonely)),
        *(
            Setting(f"${name}", x, y, effect_of_variable(name))
            for name, x, y in _different(a.environment, b.environment, scripts, lonely)
        ),
    ]
    if not scripts:
        found += [Setting(name, x, y, "versions") for name, x, y in _different(a.versions, b.versions)]
        found += [Setting(name, x, y, effect_of(name)) for name, x, y in _different(a.others, b.others)]
    return found


def _sources(left: dict[str, Any], right: dict[str, Any]) -> list[Setting]:
    """Checkouts of one name whose imported text differs; the commit is shown, the text decides."""
    found = []
    for name in sorted(left.keys() & right.keys()):
        a, b = left[name], right[name]
        if isinstance(a, dict) and isinstance(b, dict) and a.get("digest") != b.get("digest"):
            texts = [f"{str(s.get('commit', ''))[:10]} ({s.get('digest', '')})" for s in (a, b)]
            found.append(Setting(f"sources of {name}", texts[0], texts[1], "versions"))
    return found


def _contents(left: Run, right: Run) -> list[Setting]:
    steps = sorted(set(left.steps) & set(right.steps))
    if not steps:
        return []
    (weights_a, data_a), (weights_b, data_b) = (contents(run, steps[0]) for run in (left, right))
    found = []
    differ = differing_weights(weights_a, weights_b)
    if differ:
        some = f"{len(differ)} of {len(weights_a)} differ, such as {differ[0]}"
        found.append(
            Setting(
                f"weights at step {steps[0]}", digest_text(weights_a), f"{digest_text(weights_b)}; {some}", "weights"
            )
        )
    for name in sorted(data_a.keys() & data_b.keys()):
        if data_a[name] != data_b[name]:
            texts = [f"sum {int(data[name][0] or 0)}" for data in (data_a, data_b)]
            found.append(Setting(f"data at step {steps[0]}: {name}", texts[0], texts[1], "data"))
    return found


def _plain(value: Any) -> Any:
    """Text of a script as the number or list that an argument parser makes of it."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return value
    try:
        return float(value)
    except ValueError:
        return value


def _different(
    left: dict[str, Any], right: dict[str, Any], texts: bool = False, lonely: bool = True
) -> list[tuple[str, Any, Any]]:
    """Names whose values differ; `texts` if numbers may be written as text, `lonely` if absent is a difference."""
    names = sorted(left.keys() | right.keys() if lonely else left.keys() & right.keys())
    found = [(name, left.get(name), right.get(name)) for name in names]
    if texts:
        return [(name, a, b) for name, a, b in found if _plain(a) != _plain(b)]
    return [(name, a, b) for name, a, b in found if a != b]
