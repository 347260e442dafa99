"""Forward-only passes as steps: evaluation, log-prob passes of RL, inference engines.

A session with `forward_only` begins a step at a pass without backward instead of at a training schedule: a call of the
model, or a schedule with `forward_only=True`. Training goes on unseen beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from msprobe_megatron.job.session.faults import exclusive, guarded
from msprobe_megatron.job.session.steps import State, StepEvents

PREFILL, DECODE = "prefill", "decode"
_IDS = ("input_ids", "tokens")
_CACHES = ("past_key_values", "inference_context", "inference_params", "kv_cache", "cache")


class PassEvents(StepEvents):
    """The half of a `Session` that runs in every forward-only pass."""

    forward_only = False
    _by_hand = False
    _in_pass = False
    _in_other = False
    _pass_name: str | None = None

    @contextmanager
    def other_schedule(self) -> Iterator[None]:
        """While a schedule runs that is no step of this session: training beside forward-only passes, or evaluation."""
        before, self._in_other = self._in_other, True
        try:
            yield
        finally:
            self._in_other = before

    def name_pass(self, name: str) -> None:
        """Say what the next pass is (`prefill`, `decode`), where shapes do not tell: engines that flatten tokens."""
        self._pass_name = name

    @exclusive
    def pass_begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """A call of the model begins; True if it is a pass of its own, which `pass_end` has to follow."""
        if self._in_pass or self.in_schedule or self._in_other:
            return False
        if self.state is State.IDLE:
            self._begin_step("forward pass")
        else:
            self._count_step()
        self._in_pass = True
        self.microbatch_begin(model, None, [])
        if self.state is State.RECORDING:
            self._tell_pass(args, kwargs)
        return True

    @exclusive
    def pass_end(self, complete: bool) -> None:
        """The call has returned, or raised: the step ends, unless `session.step()` ends it."""
        self._in_pass = False
        if not complete:
            self.schedule_failed()
        if not self._by_hand:
            self.step()

    @guarded
    def _tell_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named, self._pass_name = self._pass_name, None
        self.clock.passes.append({"microbatch": self.clock.moment.microbatch, **describe_pass(args, kwargs, named)})


def describe_pass(args: tuple[Any, ...], kwargs: Mapping[str, Any], named: str | None = None) -> dict[str, Any]:
    """What a pass is, from the shapes of its arguments: nothing on a device is read.

    Example::

        >>> describe_pass((torch.zeros(2, 7, dtype=torch.int64),), {})
        {'pass': 'prefill', 'samples': 2, 'tokens': 14}
    """
    ids = next((kwargs[name] for name in _IDS if isinstance(kwargs.get(name), torch.Tensor)), None)
    if ids is None:
        ids = next((a for a in args if isinstance(a, torch.Tensor) and not a.is_floating_point()), None)
    if ids is None:
        return {"pass": named or PREFILL, "samples": None, "tokens": None}
    if ids.dim() != 2:
        return {"pass": named or "flattened", "samples": None, "tokens": ids.numel()}
    cached = any(_holds_tokens(kwargs.get(name)) for name in _CACHES)
    found = DECODE if cached and ids.shape[1] == 1 else PREFILL
    return {"pass": named or found, "samples": ids.shape[0], "tokens": ids.numel()}


def _holds_tokens(cache: Any) -> bool:
    """Whether a cache of keys and values has any, as far as its holder says so without asking a device."""
    if cache is None:
        return False
    length = getattr(cache, "get_seq_length", None)
    try:
        known = length() if callable(length) else getattr(cache, "sequence_len_offset", 1)
        return not isinstance(known, int) or known > 0
    except Exception:  # another library's cache: that one was passed is all that is known
        return True
