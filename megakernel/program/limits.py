"""The limits of a program file and of the sizes in it, each with its reason. The modules `header`
and `form` enforce them.
"""

from __future__ import annotations

# The maximum of each operand, of each size, and of each product of sizes that is a number of rows or columns. The sum
# of several such numbers still fits into int32.
MOST = (1 << 28) - 1
# The maximum length of the header, which is JSON. With sizes and up to 29 phases, it has about 10 kB. A longer header
# is not decoded.
MOST_HEADER_BYTES = 1 << 20
# The maximum length of a machine's or a phase's name, which tables print. A machine's name may be a
# file name, which has at most 255 bytes.
MOST_NAME = 255
# The maximum number of workers, because a trace stores the number of a worker in 16 bits.
MOST_WORKERS = 1 << 16
# The maximum number of counters of one rank in all layers together. On a CPU, each counter has a cache line of its own,
# so the counters take 1 GiB at most.
MOST_COUNTERS = 1 << 24
# The maximum number of words in a step table, which every launch copies. These words are 256 MiB. Block tables of 64
# sequences of a million tokens take 2^22 words.
MOST_STEP_WORDS = 1 << 26
