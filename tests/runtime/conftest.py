"""Fixtures with which a test runs for each SIMD width that the processor has, and for each type of computation."""

from typing import Any

import pytest
from cpu_support import WIDTHS, use

from megakernel.isa import Dtype


@pytest.fixture(params=WIDTHS)
def simd(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    use(monkeypatch, request.param)
    return str(request.param)


@pytest.fixture(params=[Dtype.F32, Dtype.BF16], ids=lambda dtype: dtype.name)
def dtype(request: Any) -> Dtype:
    return Dtype(request.param)
