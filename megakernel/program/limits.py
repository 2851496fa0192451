"""The limits of a program file and of the sizes in it, each with its reason. `header` and `form` enforce them."""

from __future__ import annotations

# The limit of operands, of sizes, and of products of sizes that count rows or columns. Sums of several such numbers
# still fit int32.
MOST = (1 << 28) - 1
# A header has sizes and up to 29 phases, about 10 kB. JSON beyond this limit is not decoded.
MOST_HEADER_BYTES = 1 << 20
# Names of machines and phases are printed in tables. A machine's name may be a file name, which has at most 255 bytes.
MOST_NAME = 255
# A trace has 16 bits for the worker.
MOST_WORKERS = 1 << 16
# Counters of one rank over all layers. A CPU keeps each counter in its own cache line: 1 GiB in all.
MOST_COUNTERS = 1 << 24
# Words of a step table (256 MiB in all), which every launch copies. Block tables of 64 sequences of a million tokens
# take 2^22 words.
MOST_STEP_WORDS = 1 << 26
