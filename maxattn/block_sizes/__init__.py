"""Block sizes of the TPU flash kernels: rules as data, an adjuster, and estimated times."""

from maxattn.block_sizes._adjust import adjust, is_legal, log_lines
from maxattn.block_sizes._padding import (
    Padding,
    nearest_with_less_padding,
    padding,
    padding_notes,
    padding_text,
)
from maxattn.block_sizes._recommend import Recommendation, recommend, recommend_table
from maxattn.block_sizes.rules import RULES, Rule
from maxattn.block_sizes.sizes import (
    DKV,
    DQ,
    FORWARD,
    BlockSizes,
    Change,
    Facts,
    facts_of,
    fused_partials_bytes,
)
from maxattn.block_sizes.vmem import vmem_bytes

__all__ = [
    "DKV",
    "DQ",
    "FORWARD",
    "RULES",
    "BlockSizes",
    "Change",
    "Facts",
    "Padding",
    "Recommendation",
    "Rule",
    "adjust",
    "facts_of",
    "fused_partials_bytes",
    "is_legal",
    "log_lines",
    "nearest_with_less_padding",
    "padding",
    "padding_notes",
    "padding_text",
    "recommend",
    "recommend_table",
    "vmem_bytes",
]
