"""The mesh axes that attention uses, and the array axes that are split over each of them."""

from __future__ import annotations

AXES = ("data", "fsdp", "context", "tensor")
BATCH_AXES = ("data", "fsdp")
# Mesh axes by the letter of an array axis of q, k, v, out or lse.
LETTERS = {
    "B": BATCH_AXES,
    "T": ("context",),
    "S": ("context",),
    "N": ("tensor",),
    "K": ("tensor",),
}
