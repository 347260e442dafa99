"""megatron.training.training: where model and optimizer are created.

On entry to `setup_model_and_optimizer` all other frameworks (ModelLink, MindSpeed) have applied their patches; on
return the chunks and the outermost optimizer exist and no step has run. Scripts on megatron-core alone call
`get_megatron_optimizer`, which takes the chunks and returns the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msprobe_megatron.job.patching.patch_set import Patch


def _setup(original: Callable[..., Any], events: Any) -> Callable[..., Any]:
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        with events.setting_up():
            result = original(*args, **kwargs)
        events.model_ready(result[0], result[1])
        return result

    return setup_model_and_optimizer


def _get_optimizer(original: Callable[..., Any], events: Any) -> Callable[..., Any]:
    def get_megatron_optimizer(config: Any, model_chunks: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = original(config, model_chunks, *args, **kwargs)
        events.optimizer_ready(model_chunks, optimizer)
        return optimizer

    return get_megatron_optimizer


PATCHES = [
    Patch(
        "training.setup_model_and_optimizer",
        ("megatron.training.training:setup_model_and_optimizer",),
        _setup,
        phase="arguments",
        why="attaches to the model chunks and the optimizer",
        sweep=True,
    ),
    Patch(
        "training.get_megatron_optimizer",
        ("megatron.core.optimizer:get_megatron_optimizer",),
        _get_optimizer,
        phase="arguments",
        why="the same for scripts on megatron-core without megatron.training",
        sweep=True,
    ),
]
