"""Declares the operations and phases of a forward pass, the format of instructions, and the step table (the input of
each launch). All other code, in Python and C++, reads these declarations instead of repeating them."""

from .access import EVERY, OWN, Access, Columns, Index, Kind, item_columns
from .buffers import BUFFERS, Buffer, Share, Space, column_share, itemsize, kv_bytes, row_shares, weight_shape
from .dims import (
    DIM_FIELDS,
    FIXED_SIZES,
    KV_BLOCK,
    Bucket,
    CDims,
    Dims,
    ModelSizes,
    Shape,
    Split,
    Units,
    Worker,
    ceil_div,
)
from .dtypes import Dtype, all_finite, from_f32, to_f32
from .opcodes import Operation, OperationFamily, Result, Rows
from .operations import OPERATIONS, accesses, cost
from .operations.attention import attention_cost, slot_work
from .operations.matmul import RESULTS
from .phases import CONTROL, DRAIN, JOIN, MAX_PHASES, PHASE_FIELDS, Forward, Phase
from .record import Column
from .step import STEP_FIELDS, StepTable
from .traffic import Loads, link_bytes, loads
