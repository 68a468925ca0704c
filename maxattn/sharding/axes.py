"""The mesh axes that attention knows, and which axes of arrays lie over them."""

from __future__ import annotations

AXES = ("data", "fsdp", "context", "tensor")
BATCH_AXES = ("data", "fsdp")
# Which mesh axes carry which array axis of q, k, v, out and lse.
LETTERS = {
    "B": BATCH_AXES,
    "T": ("context",),
    "S": ("context",),
    "N": ("tensor",),
    "K": ("tensor",),
}
