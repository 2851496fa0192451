"""Numbers that are rounded up to the next unit are shown in that unit."""

import pytest

from megakernel.units import bytes_text, milliseconds, scaled, seconds


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (seconds(999.4e-6), "999 µs"),
        (seconds(999.7e-6), "1 ms"),
        (seconds(999.7e-9), "1 µs"),
        (seconds(1234.5), "1234 s"),
        (scaled(999.7e9), "1 T"),
        (scaled(999.7e9, "FLOP/s"), "1 TFLOP/s"),
        (bytes_text(999.97e6), "1.0 GB"),
        (bytes_text(999), "999 B"),
        (milliseconds(9.9), "9,900 ms"),
        (milliseconds(9.9996), "10.00 s"),
    ],
)
def test_a_number_has_the_unit_of_its_rounded_value(shown: str, expected: str) -> None:
    assert shown == expected
