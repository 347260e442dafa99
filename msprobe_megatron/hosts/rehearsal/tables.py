"""What a rehearsal changes in a recipe's command line, as tables: one more flag is one more row.

Names are Megatron's flags without their dashes. A row only counts where the recipe gives the flag, except `ALWAYS`.
"""

from __future__ import annotations

from collections.abc import Mapping

from msprobe_megatron.config.save_flags import GONE

# The checkouts that are known: folder beside the script -> what the host is called.
HOSTS = {"modellink": "ModelLink", "mindspeed_llm": "MindSpeed-LLM", "megatron": "Megatron-LM"}
ASCEND = ("modellink", "mindspeed_llm")

# The smallest model that has every part: numbers above these come down to them, smaller ones stay.
AT_MOST = {
    **{"hidden-size": 64, "ffn-hidden-size": 128, "num-attention-heads": 4, "num-query-groups": 2, "kv-channels": 16},
    **{"seq-length": 32, "max-position-embeddings": 32, "sliding-window": 16, "micro-batch-size": 1},
    **{"train-iters": 5, "padded-vocab-size": 4400, "recompute-num-layers": 1},
    # Experts.
    **{"num-experts": 4, "moe-router-topk": 2, "moe-intermediate-size": 64, "moe-ffn-hidden-size": 64},
    **{"moe-shared-expert-intermediate-size": 64, "n-shared-experts": 1, "first-k-dense-replace": 1},
    **{"moe-router-num-groups": 2, "moe-router-group-topk": 1, "n-group": 2, "topk-group": 1, "moe-layer-freq": 1},
    **{"expert-tensor-parallel-size": 1, "mtp-num-layers": 1},
    # Latent attention.
    **{"kv-lora-rank": 16, "q-lora-rank": 16, "v-head-dim": 16, "qk-rope-head-dim": 8, "qk-nope-head-dim": 16},
    **{"qk-pos-emb-head-dim": 8, "qk-head-dim": 16},
}
# In fp16 the first steps of a job overflow until the scale has come down: more of them than are trained here.
LOSS_SCALE = 1024
# What the recipe cannot give on this machine. NullTokenizer adds a token; mock data needs a vocabulary above 4095.
ALWAYS: Mapping[str, str] = {
    **{"mock-data": "", "tokenizer-type": "NullTokenizer", "vocab-size": "4399", "train-iters": "5"},
    **{"split": "60,30,10", "eval-iters": "1", "eval-interval": "1000", "num-workers": "0", "log-interval": "1"},
    "distributed-backend": "gloo",
}
# ModelLink and MindSpeed-LLM take care of the others themselves.
ASCEND_SWITCHES = ("no-gradient-accumulation-fusion",)
# Megatron-LM alone asks for fused kernels unless it is told not to; the switches, where its parser has them.
PLAIN_KERNELS: Mapping[str, str] = {"transformer-impl": "local"}
PLAIN_SWITCHES = (
    *("no-gradient-accumulation-fusion", "no-masked-softmax-fusion", "no-persist-layer-norm", "no-rope-fusion"),
    *("no-bias-dropout-fusion", "no-bias-gelu-fusion", "no-bias-swiglu-fusion", "use-cpu-initialization"),
)
# Why -> flags that are left out for it. A name that ends in * stands for all that begin so.
FILES = "files of the real job"
LEFT_OUT: Mapping[str, tuple[str, ...]] = {
    FILES: (
        *("data-path", "train-data-path", "valid-data-path", "test-data-path", "data-cache-path", "data-args-path"),
        *("per-split-data-args-path", "tokenizer-model", "tokenizer-name-or-path", "tokenizer-kwargs", "vocab-file"),
        *("merge-file", "tokenizer-not-use-fast", "tokenizer-padding-side", "tiktoken-pattern", "load"),
        *("save-interval", "pretrained-checkpoint", "exit-on-missing-checkpoint", "finetune", "ckpt-format"),
        *("tensorboard-dir", "wandb-*", "enable-hf2mg-convert", "model-type-hf", "handler-name", "profile*"),
        *("no-shared-storage", "moe-use-upcycling"),
        *(name for name in GONE if not name.startswith("exit-")),
    ),
    "schedule of the long job": (
        *("train-samples", "lr-decay-iters", "lr-decay-samples", "lr-warmup-iters", "lr-warmup-samples"),
        *("lr-warmup-fraction", "lr-wsd-*", "rampup-batch-size", "exit-duration-in-mins"),
        "exit-signal-handler",
    ),
    # Their samples want a tokenizer with words; what is trained, and how, is left as it is.
    "tuning data, for which mock data of pre-training is taken": (
        *("is-instruction-dataset", "prompt-type*", "variable-seq-lengths", "pad-to-multiple-of", "neat-pack"),
        *("no-pad-to-seq-lengths", "reset-position-ids", "reset-attention-mask", "cutoff-len", "overwrite-cache"),
        *("padded-samples", "add-eos-token", "history-turns", "use-fused-cross-entropy-loss"),
    ),
    "parts of a layout that does not fit": (
        *("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank", "num-layer-list"),
        *("noop-layers", "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers", "schedules-method"),
        *("pipeline-model-parallel-layout", "standalone-embedding-stage", "moe-tp-extend-ep", "tp-2d", "tp-x", "tp-y"),
        "output-layer-slice-num",
    ),
    "operators that nothing stands in for": (
        *("use-mc2", "use-ascend-mc2", "use-ascend-coc", "coc-*", "moe-bmm-mc2", "moe-alltoall-mc2"),
        *("moe-grouped-gemm", "moe-permute-fusion", "moe-alltoall-overlap-comm", "moe-allgather-overlap-comm"),
        *("moe-fb-overlap", "use-fused-moe-token-permute-and-unpermute", "gemm-gradient-accumulation-fusion"),
        *("reuse-fp32-param", "swap-*", "smart-swap", "mla-fa-without-pad", "mla-mm-split", "use-triton-gdn"),
        *("use-torch-fsdp2", "fsdp2-config-path", "recompute-in-advance", "recompute-in-bubble"),
    ),
}
# Scripts that a rehearsal refuses, and why.
REFUSED: Mapping[str, str] = {
    "trainer.py": "it trains on pairs or instructions, for which there is no mock data",
    "posttrain_gpt.py": "it trains on pairs or instructions, for which there is no mock data",
    "rlhf_gpt.py": "it generates with a real model and its tokenizer",
    "pretrain_mamba.py": "nothing stands in for the kernels of its layers",
    "train_fsdp2.py": "it trains without Megatron",
}
# The same, in one host.
LEFT_OUT_IN: Mapping[str, tuple[str, ...]] = {
    # MindSpeed compiles it against CANN when it is first called.
    "mindspeed_llm": ("use-fused-rotary-pos-emb",),
    # Kernels of TransformerEngine.
    "megatron": ("attention-backend", "fp8-*", "cross-entropy-loss-fusion", "apply-layernorm-1p"),
}
# With a context-parallel size of one.
CONTEXT_PARALLEL = (
    *("context-parallel-algo", "use-cp-send-recv-overlap", "use-fused-ring-attention-update", "cp-comm-type"),
    *("kv-head-repeat-before-uly-alltoall", "ulysses-degree-in-cp", "cp-window-size", "hierarchical-*"),
)
# What an installation of these hosts puts beside the script, and how: said where it is not there.
TO_INSTALL: Mapping[str, Mapping[str, str]] = {
    "modellink": {
        "megatron": "git checkout core_r0.6.0 in Megatron-LM, then cp -r megatron {folder}/ (its examples/README.md)",
        "mindspeed": "git checkout 4ea42a23 in MindSpeed, then there: pip install 'setuptools<81' wheel 'numpy<2',"
        " pip install -r requirements.txt, pip install --no-build-isolation -e . (its setup.py starts pip)",
    },
    "mindspeed_llm": {
        "megatron": "git checkout core_v0.12.1 in Megatron-LM, then cp -r megatron {folder}/"
        " (its docs/pytorch/install_guide.md)",
        "mindspeed": "in the MindSpeed of the same release: pip install 'setuptools<81' wheel 'numpy<2',"
        " pip install -r requirements.txt, pip install --no-build-isolation -e . (its setup.py starts pip)",
    },
}
