"""The places in which torch's own Python reads a value: to choose a faster form, or to check an argument.

A trace has no values. Two functions and the checks of distributions get the answer with which the same numbers follow.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch.distributions import Distribution
from torch.nn import functional as F

from funcamp import _upstream

_detect_is_causal_mask: Any = _upstream.find("torch.nn.modules.transformer._detect_is_causal_mask")
#: What to answer the functions that ask whether something holds: is the mask causal, so that attention need not read
#: it; is a variance negative, which is an error; are all values those that a distribution takes.
_ANSWERS = {
    getattr(function, "__code__", None): answer
    for function, answer in {
        _detect_is_causal_mask: False,
        F.gaussian_nll_loss: False,
        Distribution.__init__: True,
        Distribution._validate_sample: True,
    }.items()
}
#: How many frames, those of dispatch modes, there are at most between such a function and the watch of its read.
_FRAMES_BETWEEN = 16


def answer_to_read() -> bool | None:
    """Return the answer to the read that is being dispatched, if it is one of torch's own; else None."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_FRAMES_BETWEEN):
        if frame is None or frame.f_code in _ANSWERS:
            break
        frame = frame.f_back
    return None if frame is None else _ANSWERS.get(frame.f_code)
