"""The limits of a program file and of the sizes in it, each with its reason. The modules `header`
and `form` enforce them.
"""

from __future__ import annotations

# The maximum of operands, of sizes, and of products of sizes that count rows or columns. The sum of
# several such numbers still fits into int32.
MOST = (1 << 28) - 1
# A header has sizes and up to 29 phases, about 10 kB. JSON beyond this limit is not decoded.
MOST_HEADER_BYTES = 1 << 20
# The maximum length of a machine's or a phase's name, which tables print. A machine's name may be a
# file name, which has at most 255 bytes.
MOST_NAME = 255
# A trace has 16 bits for the worker.
MOST_WORKERS = 1 << 16
# The counters of one rank in all layers. On a CPU, each has a cache line of its own, so they take 1
# GiB at most.
MOST_COUNTERS = 1 << 24
# The words of a step table, which every launch copies: 256 MiB. Block tables of 64 sequences of a
# million tokens take 2^22 words.
MOST_STEP_WORDS = 1 << 26
