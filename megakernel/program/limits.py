"""The limits of a program file, and of the sizes in it, each with its reason. `header` and `form` enforce them."""

from __future__ import annotations

# An operand, a size, or a product of sizes that is a row or a column: sums of several of them fit int32.
MOST = (1 << 28) - 1
# A header holds sizes and up to 29 phases, which take about 10 kB; JSON is not decoded beyond this.
MOST_HEADER_BYTES = 1 << 20
# Names of machines and phases are printed in tables. A file's name, which a machine's may be, has at most 255 bytes.
MOST_NAME = 255
# A trace has 16 bits for the worker.
MOST_WORKERS = 1 << 16
# Of one rank and all layers. A CPU keeps each counter in a cache line of its own: 1 GiB.
MOST_COUNTERS = 1 << 24
# Of a step table, which every launch copies: 256 MiB. Block tables of 64 sequences of a million tokens have 2^22.
MOST_STEP_WORDS = 1 << 26
