"""How two runs were started: arguments and versions that differ, ordered by what they do to the numbers.

Reads run.json only. The table below says what a group of Megatron's arguments changes; an argument that is in no group
is listed as of unknown effect, before those that only spread the work otherwise.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from msprobe_megatron.analyse.load import Run

# Effect, most important first, and the names that have it. Whole names, by regular expression; the first match counts.
_EFFECTS: tuple[tuple[str, str], ...] = (
    (
        "none",
        r"msprobe_.*|log_.*|.*_log|.*logging.*|tensorboard.*|wandb.*|save.*|timing.*|exit_.*|local_rank|rank|hostname",
    ),
    (
        "none",
        r"num_workers|eval_.*|.*_interval|distributed_timeout.*|mock_data|world_size|check_for_.*|layers_per_chunk|use_mcore_models",
    ),
    (
        "model",
        r"num_layers|.*hidden_size|num_attention_heads|kv_channels|.*query_.*|num_experts|.*vocab_size|seq_length",
    ),
    ("model", r"max_position_embeddings|position_embedding.*|rotary.*|normalization|norm_epsilon|swiglu|squared_relu"),
    (
        "model",
        r"make_vocab.*|untie_.*|add_bias_linear|add_qkv_bias|qk_layernorm|.*_dropout|init_method.*|moe_(router|aux|z|ffn).*",
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
    ("precision", r"bf16|fp16|fp8.*|.*_in_fp32|params_dtype|.*dtype|fp32_.*|grad_reduce.*|main_.*_dtype"),
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
ORDER = ("model", "data", "optimizer", "precision", "kernels", "versions", "unknown", "layout", "none")
WORDS = {
    "model": "another model: results cannot be compared",
    "data": "other samples or another order of them",
    "optimizer": "other updates: equal at the first step only",
    "precision": "coarser or finer rounding",
    "kernels": "other kernels: differences of rounding",
    "versions": "other software: differences of rounding, or more",
    "unknown": "effect not known",
    "layout": "other order of additions: differences of rounding",
    "none": "no effect on numbers",
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


def env_diff(left: Run, right: Run) -> EnvDiff:
    """Settings of two runs that differ, ordered by effect.

    Example::

        env_diff(open_run("a"), open_run("b")).matters
    """
    found = [
        Setting(name, a, b, "versions" if section == "versions" else effect_of(name))
        for section in ("arguments", "versions")
        for name, a, b in _different(left.facts.get(section, {}), right.facts.get(section, {}))
    ]
    if not left.facts.get("arguments") or not right.facts.get("arguments"):
        found += [
            Setting(name, a, b, effect_of(name))
            for section in ("sizes", "recompute")
            for name, a, b in _different(left.facts.get(section, {}), right.facts.get(section, {}))
        ]
    found.sort(key=lambda setting: (ORDER.index(setting.effect), setting.name))
    return EnvDiff(str(left.path), str(right.path), found)


def _different(left: dict[str, Any], right: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    names = sorted(left.keys() | right.keys())
    return [(name, left.get(name), right.get(name)) for name in names if left.get(name) != right.get(name)]
