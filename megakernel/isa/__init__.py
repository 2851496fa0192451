"""What an instruction is and what a step is. Everything else reads these tables; nothing repeats them."""

from .access import EVERY, OWN, Access, Column, Index, Kind, item_columns
from .buffers import BIASES, BUFFERS, Buffer, BufferSpec, Space
from .costs import Cost, attention_cost, itemsize
from .dims import DIM_FIELDS, KV_BLOCK, SHARD_UNIT, Dims
from .dtypes import Dtype, from_f32, to_f32
from .instructions import BY_NAME, BY_OPCODE, INSTRUCTIONS, Family, Instruction
from .items import item_work, slot_work
from .link import link_bytes
from .pages import Matmul, Pages, Stream, attention_pages, kv_pages, matmul_pages, tile_work
from .step import STEP_FIELDS, StepField, StepTable

__all__ = [
    "BIASES",
    "BUFFERS",
    "BY_NAME",
    "BY_OPCODE",
    "DIM_FIELDS",
    "EVERY",
    "INSTRUCTIONS",
    "KV_BLOCK",
    "OWN",
    "SHARD_UNIT",
    "STEP_FIELDS",
    "Access",
    "Buffer",
    "BufferSpec",
    "Column",
    "Cost",
    "Dims",
    "Dtype",
    "Family",
    "Index",
    "Instruction",
    "Kind",
    "Matmul",
    "Pages",
    "Space",
    "StepField",
    "StepTable",
    "Stream",
    "attention_cost",
    "attention_pages",
    "from_f32",
    "item_columns",
    "item_work",
    "itemsize",
    "kv_pages",
    "link_bytes",
    "matmul_pages",
    "slot_work",
    "tile_work",
    "to_f32",
]
