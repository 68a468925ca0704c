"""FlashAttention-4's backward over many blocks of keys: its three launches apart, so that two of them are made once.

    first    delta = rowsum(dout * out), the LSE in base 2, dQ = 0 in float32
    blocks   dQ += dS K in place, dK, dV
    last     dQ, scaled, in q's dtype

A block is one array, which arrived so, and its gradients leave as one: the kernel reads and writes them in place.

Source: Dao-AILab, flash-attention (CuTe kernels); the launches of fa4-jax 0.1.0.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn.kernels.fa4 import Fa4
from maxattn.kernels.fa4_calls import widened
from maxattn.kernels.fa4_launch import library, run_block
from maxattn.kernels.fa4_sizes import backward_tile
from maxattn.kernels.key_blocks import TWO_TILES, WHOLE, Cut, Packed, Shares, halves
from maxattn.kernels.rounds import divided
from maxattn.kernels.softmax import BIG_LSE, NEG_INF
from maxattn.kernels.sums import Rows
from maxattn.kernels.tile_order import PROCESSORS

LAUNCHES = ("_fa4_bwd_pre", "_fa4_bwd", "_fa4_bwd_post", "_get_static", "_aux_static", "_bwd_plan", "_validate")
HEAD_LIMIT = 128  # beyond it heads are padded: fa4_calls.py


def fits(kernel: Fa4, q: Array, k: Array) -> bool:
    """Tell whether the launches are there and are these three: one key head for each query head, 8 | H up to 128."""
    plain = q.shape[2] == k.shape[2] and q.shape[3] % 8 == 0 and q.shape[3] <= HEAD_LIMIT
    plain = plain and k.shape[1] >= TWO_TILES
    return plain and not kernel.lse_gradient and all(hasattr(library(), name) for name in LAUNCHES)


def shares(k: Array, places: int) -> Shares:
    """Divide a ring's keys so that the launches fill the processors.

    Args:
        k: a place's own keys.
        places: of the ring.
    """
    batch, length, heads, head_dim = k.shape
    # Room for guests stands between a block's batch rows, which the forward would have to copy out.
    made = divided(length, backward_tile(head_dim).keys, batch * heads, places, PROCESSORS)
    return made if made.middle and (batch == 1 or not made.along) else halves(length)


class Fa4Sums:
    """Hold delta, the LSE in base 2, and dQ in float32.

    Args:
        scale: multiplies the scores.
        q, k: this device's queries, and keys of some block, whose shape alone counts.
        rows: of the queries.
    """

    def __init__(self, scale: float, q: Array, k: Array, rows: Rows) -> None:
        out, lse, dout, _ = rows
        self._q, self._dout = widened(q), widened(dout.astype(q.dtype))
        self._launches = _Launches(scale, q, k)
        # Rows that padding added have no LSE and no gradient.
        safe = jnp.where(lse == NEG_INF, BIG_LSE, lse)
        self.state: Any = self._launches.first(out.astype(q.dtype), self._dout, safe)

    def add(self, keys: Packed, cut: Cut = WHOLE, grads: Packed | None = None) -> Packed:
        """Add a part of a block of keys to dQ, and write its (dk, dv) into `grads`, or into a new array."""
        delta, lse, dq = self.state
        dq, found = self._launches.block(self._q, keys, self._dout, lse, delta, dq, cut, grads)
        self.state = delta, lse, dq
        return found

    def dq(self) -> Array:
        """Return dQ over all blocks so far, in q's dtype."""
        return self._launches.last(self.state[2], self._q)


class _Launches:
    """Make fa4-jax's launches, as its own backward makes them one after the other."""

    def __init__(self, scale: float, q: Array, k: Array) -> None:
        fa4 = library()
        self._call = import_module("cutejax").call
        config = import_module("fa4_jax.attention").AttnConfig(
            False, False, (None, None), float(scale), None, "cute", False, False
        )
        dtype, head_dim, _, ratio, arch = fa4._validate(config, "bwd", q, k, k)
        tile = fa4._bwd_plan(dtype, head_dim, head_dim, ratio, False, False, arch).tile_m
        self._made: Any = fa4._get_static(config, dtype, head_dim, head_dim, ratio, arch, "bwd")
        b, t, n, _ = q.shape
        rows, width = -(-t // tile) * tile, -(-head_dim // 32) * 32
        self._stats = jax.ShapeDtypeStruct((b, n, rows), jnp.float32)
        self._dq = jax.ShapeDtypeStruct((b, n, rows * width), jnp.float32)

    def first(self, out: Array, dout: Array, lse: Array) -> Any:
        fa4 = library()
        return self._call(
            fa4._fa4_bwd_pre, [self._stats, self._stats, self._dq],
            fa4._aux_static("pre", self._made["pre"], self._made["scale"]), out, dout, lse,
            in_specs=[fa4._QKV_SPEC, fa4._QKV_SPEC, fa4._LSE_SPEC], out_specs=fa4._F32_SPEC, name="fa4_bwd_pre",
        )  # fmt: skip

    def block(
        self, q: Array, keys: Packed, dout: Array, lse: Array, delta: Array, dq: Array, cut: Cut, grads: Packed | None
    ) -> Any:
        fa4 = library()
        heads, floats, packed = fa4._QKV_SPEC, fa4._F32_SPEC, import_module("cutejax").ArraySpec(static_dims=(3, 4))
        before = () if grads is None else (grads,)
        return self._call(
            run_block, [self._dq, jax.ShapeDtypeStruct(keys.shape, keys.dtype)],
            self._made, cut, q, keys, dout, lse, delta, dq, before,
            in_specs=[heads, packed, heads] + [floats] * 3 + [packed] * len(before), out_specs=[floats, packed],
            input_output_aliases={5: 0} | ({6: 1} if before else {}), name="maxattn_backward_block",
        )  # fmt: skip

    def last(self, dq: Array, q: Array) -> Array:
        fa4 = library()
        made = fa4._aux_static("post", self._made["post"], self._made["scale"])
        return self._call(
            fa4._fa4_bwd_post, jax.ShapeDtypeStruct(q.shape, q.dtype), made, dq, in_specs=[fa4._F32_SPEC],
            out_specs=fa4._QKV_SPEC, name="fa4_bwd_post",
        )  # fmt: skip
