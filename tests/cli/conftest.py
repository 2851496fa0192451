"""Settings for the tests of the command line."""

import pytest

from megakernel.roofline import Ceilings
from megakernel.serving.bench import ceilings, offline


@pytest.fixture(autouse=True)
def quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the measurements of the machine's peak rates, which take seconds and vary."""
    rates = {"how": "made up", "cache_bytes_per_s": 1e13}
    monkeypatch.setattr(ceilings, "host_ceilings", lambda threads, **_: Ceilings(1e12, 1e15, threads, **rates))
    monkeypatch.setattr(offline, "read_rate", lambda *_: 1e12)
