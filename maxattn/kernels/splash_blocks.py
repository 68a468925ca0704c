"""Tile sizes of splash where nobody has adjusted them: multiples of 128, no longer than the padded lengths."""

from __future__ import annotations

from dataclasses import dataclass

from maxattn.call import Call
from maxattn.config import FlashBlockSizes

LANES = 128
DEFAULT = 512  # long enough to keep the matrix unit busy, short enough for VMEM at head dim 256 in float32


@dataclass(frozen=True)
class Tiles:
    """Hold splash's nine choices, all of them decided; named as in the config."""

    block_q: int
    block_kv: int
    block_kv_compute: int
    block_q_dkv: int
    block_kv_dkv: int
    block_kv_dkv_compute: int
    block_q_dq: int
    block_kv_dq: int
    use_fused_bwd_kernel: bool = False

    @property
    def forward(self) -> tuple[int, int, int]:
        """(q, kv, kv_compute) of the forward kernel."""
        return self.block_q, self.block_kv, self.block_kv_compute

    @property
    def dkv(self) -> tuple[int, int, int]:
        """(q, kv, kv_compute) of the backward kernel of K and V."""
        return self.block_q_dkv, self.block_kv_dkv, self.block_kv_dkv_compute

    @property
    def dq(self) -> tuple[int, int]:
        """(q, kv) of the backward kernel of Q."""
        return self.block_q_dq, self.block_kv_dq

    def text(self) -> str:
        """Say the sizes as q x kv / kv_compute for `explain`."""

        def sizes(q: int, kv: int, compute: int) -> str:
            return f"{q} x {kv}" + (f" in {compute}" if compute != kv else "")

        dq = "dq fused" if self.use_fused_bwd_kernel else f"dq {sizes(*self.dq, self.block_kv_dq)}"
        return f"forward {sizes(*self.forward)}, dkv {sizes(*self.dkv)}, {dq} (queries x keys)"


def choose(call: Call, asked: FlashBlockSizes) -> Tiles:
    """Choose the tiles: the config's where set, else 512, rounded up to 128 and cut to the padded lengths.

    A compute tile that does not divide its tile becomes the tile.
    """
    q_most, kv_most = (-(-n // LANES) * LANES for n in (call.q_len, call.kv_len))

    def tile(size: int | None, default: int, most: int) -> int:
        return min(-(-(size or default) // LANES) * LANES, most)

    def compute(size: int | None, block: int) -> int:
        whole = tile(size, block, block)
        return whole if block % whole == 0 else block

    q, kv = tile(asked.block_q, DEFAULT, q_most), tile(asked.block_kv, DEFAULT, kv_most)
    kv_dkv = tile(asked.block_kv_dkv, kv, kv_most)
    return Tiles(
        q, kv, compute(asked.block_kv_compute, kv),
        tile(asked.block_q_dkv, q, q_most), kv_dkv, compute(asked.block_kv_dkv_compute, kv_dkv),
        tile(asked.block_q_dq, q, q_most), tile(asked.block_kv_dq, kv, kv_most), bool(asked.use_fused_bwd_kernel),
    )  # fmt: skip
