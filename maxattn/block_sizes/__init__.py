"""Block sizes of the TPU flash kernels: rules as data, an adjuster, and estimated times."""

from maxattn.block_sizes._adjust import adjust, log_lines
from maxattn.block_sizes._padding import (
    nearest_with_less_padding,
    padding,
    padding_notes,
    padding_text,
)
from maxattn.block_sizes._recommend import recommend, recommend_table
from maxattn.block_sizes.sizes import (
    DKV,
    DQ,
    FORWARD,
    BlockSizes,
    Change,
    facts_of,
    fused_partials_bytes,
)

__all__ = [
    "DKV",
    "DQ",
    "FORWARD",
    "BlockSizes",
    "Change",
    "adjust",
    "facts_of",
    "fused_partials_bytes",
    "log_lines",
    "nearest_with_less_padding",
    "padding",
    "padding_notes",
    "padding_text",
    "recommend",
    "recommend_table",
]
