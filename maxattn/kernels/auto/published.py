"""What others published of kernels on GPUs that maxattn did not measure.

A row holds where its publication measured: a compute capability, versions of cuDNN, head dims,
lengths. What lies outside of all rows goes by the rule in gpu.py, and a table of our own
measurements (table.json) comes before both.
"""

from __future__ import annotations

from dataclasses import dataclass

from maxattn.call import Call
from maxattn.devices import Capability
from maxattn.jax_private.versions import Versions, numbers
from maxattn.kernels.fused import cudnn_limits
from maxattn.target import Target


@dataclass(frozen=True)
class PublishedRow:
    """Hold one comparison of kernels over all pairs, in bfloat16.

    Args:
        capability: of the GPU.
        cudnn: versions of cuDNN that it holds for; one that is not known counts as the newest.
        head_dims: that were measured.
        least: of the queries and of the keys.
        first: what ran fastest; "a/b" is the forward of a and the backward of b.
        says: what was measured, with the machine.
        source: where it is published.
    """

    capability: Capability
    cudnn: Versions
    head_dims: tuple[int, ...]
    least: int
    first: str
    says: str
    source: str

    @property
    def because(self) -> str:
        """Say why its kernel comes first."""
        return f"{self.says}: published by {self.source}, not measured by maxattn here"

    def holds(self, call: Call, target: Target) -> bool:
        """Tell whether a call lies where the row was measured."""
        there = cudnn_limits.version(target) or ""
        is_there = self.cudnn.hold(there) if numbers(there) else self.cudnn.below == NEWEST
        sizes = min(call.q_len, call.kv_len) >= self.least and call.head_dim in self.head_dims
        sizes = sizes and not call.value_head_dim
        is_gpu = target.device.capability == self.capability
        return is_gpu and is_there and sizes and call.dtype == "bfloat16" and call.mask.is_full


NEWEST = "10"  # cuDNN's first number to come: rows up to there hold for the newest
# The paper's backward has two thread blocks share a tile, and fa4-jax 0.1.0 launches one: of it
# only the forward is taken.
ROWS = (
    PublishedRow(
        (10, 0), Versions("9.19", NEWEST), (128,), 4096, "cudnn",
        "cuDNN is 1.24 to 1.98 times as fast as FlashAttention-4 in the forward of video and image"
        " models (B200, cuDNN 9.19)",
        "SGLang, pull request 33655",
    ),
    PublishedRow(
        (10, 0), Versions("9.13", "9.14"), (128,), 4096, "flash/cudnn",
        "FlashAttention-4's forward is up to 1.3 times as fast as that of cuDNN 9.13 (B200)",
        "arXiv 2603.05451",
    ),
)  # fmt: skip


def row_for(call: Call, target: Target) -> PublishedRow | None:
    """Return the first row that holds for a call."""
    return next((row for row in ROWS if row.holds(call, target)), None)
