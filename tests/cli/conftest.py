"""Settings for the tests of the command line."""

import pytest

from megakernel.roofline import Ceilings
from megakernel.serving.bench import ceilings


@pytest.fixture(autouse=True)
def quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the measurement of the machine's peak rates, which takes seconds."""
    monkeypatch.setattr(
        ceilings, "host_ceilings", lambda threads, **_: Ceilings(1e12, 1e15, threads, "made up", cache_bytes_per_s=1e13)
    )
