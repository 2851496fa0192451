"""SamplingParams accepts the smallest and largest allowed value of each parameter and refuses values beyond."""

import math
from typing import Any

import numpy as np
import pytest

from megakernel import SamplingParams
from megakernel.errors import MegakernelError

_TINY, _HUGE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_INT32 = 2**31 - 1
# The smallest and the largest allowed value of each integer parameter.
WHOLE = {"top_k": (-1, _INT32), "n": (1, 128), "min_tokens": (0, 16), "max_tokens": (1, _INT32), "seed": (0, 2**64 - 1)}
WHOLE |= {"logprobs": (0, 20), "prompt_logprobs": (0, 20)}
REAL = {"temperature": (0.0, _HUGE), "top_p": (_TINY, 1.0), "min_p": (0.0, 1.0), "presence_penalty": (-2.0, 2.0)}
REAL |= {"frequency_penalty": (-2.0, 2.0), "repetition_penalty": (_TINY, _HUGE)}


def refused(message: str, **fields: Any) -> None:
    with pytest.raises(MegakernelError, match=message):
        SamplingParams(**fields)


@pytest.mark.parametrize("name", [*WHOLE, *REAL])
def test_the_least_and_the_most_are_taken(name: str) -> None:
    whole = name in WHOLE
    least, most = WHOLE[name] if whole else REAL[name]
    for value in (least, most):
        assert getattr(SamplingParams(**{name: value}), name) == value
    below, above = math.nextafter(least, -math.inf), math.nextafter(most, math.inf)
    below, above = (least - 1, most + 1) if whole else (below, above)
    for value in (below, above, True, "1"):
        refused(f"sampling parameter {name}=", **{name: value})
    if whole:
        refused(f"sampling parameter {name}=", **{name: float(least)})
    else:
        for value in (float("nan"), 10**400):
            refused(f"sampling parameter {name}=", **{name: value})


def test_lengths() -> None:
    assert SamplingParams(min_tokens=16).min_tokens == 16
    assert SamplingParams(min_tokens=2**31 - 1, max_tokens=None).min_tokens == 2**31 - 1
    refused("min_tokens=17 must not exceed max_tokens", min_tokens=17)
    refused("min_tokens=2147483648 must be a whole number", min_tokens=2**31, max_tokens=None)
    assert SamplingParams(n=2, best_of=2).best_of == 2
    refused(r"best_of=1 must equal n \(2\)", n=2, best_of=1)
    refused(r"best_of=3 must equal n \(2\)", n=2, best_of=3)


@pytest.mark.parametrize("value", ["", ["a", ""], [1], [None]])
def test_stop_strings(value: Any) -> None:
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    refused("stop=", stop=value)


def test_ids_and_biases() -> None:
    ids = list(range(127))
    assert len(SamplingParams(stop_token_ids=[*ids, _INT32]).stop_token_ids) == 128
    refused("stop_token_ids has.*at most 128", stop_token_ids=[*ids, 127, 128])
    for wrong in (-1, 2**31, True, 1.0):
        refused("stop_token_ids=", stop_token_ids=[wrong])
        refused("logit_bias=", logit_bias={wrong: 1.0})
        refused("allowed_token_ids=", allowed_token_ids=[wrong])
    biases = {i: 100.0 if i % 2 else -100.0 for i in range(299)}
    assert len(SamplingParams(logit_bias=biases | {_INT32: 0.0}).logit_bias) == 300
    refused("logit_bias has.*at most 300", logit_bias=biases | {299: 0.0, 300: 0.0})
    for value in (math.nextafter(100.0, 200.0), math.nextafter(-100.0, -200.0), float("nan"), True):
        refused("logit_bias=", logit_bias={0: value})
