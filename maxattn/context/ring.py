"""Ring attention: queries stay, K and V go round the devices of the context axis, one block at a time.

Hop h brings each device the block of the device h places before it. The next block is on its way while this one is
computed. Partial results are merged by log-sum-exp in float32. The backward goes round again with the global output and
LSE, and the gradients of K and V travel with them until they are home. Hops that the mask leaves empty on every device
are not made, and a device skips a block that is empty for it alone.

Source: Liu et al., Ring Attention with Blockwise Transformers (arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from maxattn.call import Call
from maxattn.context.all_gather import CONTEXT, WholeKeys
from maxattn.context.base import Collective, itemsize
from maxattn.context.merge import NEG_INF, merge
from maxattn.kernels.base import Bias, Kernel
from maxattn.masks import EMPTY, Mask
from maxattn.sharding import ways


@dataclass(frozen=True)
class Ring(WholeKeys):
    """Attend to one device's keys after the other's, while the next ones travel."""

    name: ClassVar[str] = "ring"
    inner: int = 1  # neighbouring devices that act as one place of the ring (they exchange heads: ulysses.py)

    @property
    def places(self) -> int:
        """The places of the ring."""
        return ways("S", self.shape) // self.inner

    def kv_letter(self) -> str:
        """Keys stay split over context."""
        return "S"

    def local_call(self, call: Call) -> Call:
        """Return the call of one hop: this device's queries against one device's keys."""
        return replace(super().local_call(call), kv_len=-(-call.kv_len // self.places))

    def collectives(self, call: Call) -> tuple[Collective, ...]:
        """Name the hops of K and V, and of their gradients on the way home."""
        sends = len(self.hops(call.mask, call.q_len, call.kv_len)) - 1
        keys, grads = self._kv_bytes(call, itemsize(call.dtype)), self._kv_bytes(call, 4)
        hops = (
            ("K,V", "forward", keys, sends),
            ("K,V", "backward", keys, sends),
            ("dK,dV", "backward", grads, sends + 1 if sends else 0),
        )
        return tuple(Collective("ppermute", (CONTEXT,), w, when, b * n, n) for w, when, b, n in hops if n)

    def hops(self, mask: Mask, q_len: int, kv_len: int) -> tuple[int, ...]:
        """List the hops in which at least one device has something to compute; hop 0 is always made."""
        some = (self._empty(mask, q_len, kv_len) == 0).any(axis=0)
        return tuple(h for h in range(some.shape[0]) if h == 0 or some[h])

    def forward(self, kernel: Kernel, q: Array, k: Array, v: Array, bias: Bias, mask: Mask) -> tuple[Array, Array]:
        """Return this device's (out, lse)."""
        ring = _Round(self, q, k, mask)
        total = _of_nothing_seen(q)
        for hop, (k_h, v_h) in ring.blocks(k, v):

            def attend(k_h: Array, v_h: Array, hop: int = hop) -> tuple[Array, Array]:
                part = kernel.forward(q, k_h, v_h, ring.of_keys(bias, hop), ring.mask(hop), *ring.offsets(hop))
                return part[0].astype(jnp.float32), part[1]

            total = merge(total, ring.unless_empty(hop, attend, (k_h, v_h)))
        return total[0].astype(q.dtype), total[1]

    def backward(
        self, kernel: Kernel, q: Array, k: Array, v: Array, bias: Bias, mask: Mask,
        out: Array, lse: Array, dout: Array, dlse: Array,
    ) -> tuple[Array, Array, Array, Bias]:  # fmt: skip
        """Return this device's gradients; those of its K and V have been round the ring and are complete."""
        ring = _Round(self, q, k, mask)
        dq, dbias = jnp.zeros_like(q, jnp.float32), None if bias is None else jnp.zeros_like(bias, jnp.float32)
        dk = dv = jnp.zeros_like(k, jnp.float32)
        for hop, (k_h, v_h) in ring.blocks(k, v):

            def gradients(k_h: Array, v_h: Array, hop: int = hop) -> tuple[Array, Array, Array, Bias]:
                part = ring.of_keys(bias, hop), ring.mask(hop), *ring.offsets(hop)
                g = kernel.backward(q, k_h, v_h, *part, out, lse, dout, dlse)
                return jax.tree.map(lambda x: x.astype(jnp.float32), g)

            dq_h, dk_h, dv_h, dbias_h = ring.unless_empty(hop, gradients, (k_h, v_h))
            dq, dbias = dq + dq_h, ring.add_of_keys(dbias, dbias_h, hop)
            dk, dv = ring.onwards(hop, (dk + dk_h, dv + dv_h), home=True)
        return dq, dk.astype(k.dtype), dv.astype(v.dtype), dbias

    def _empty(self, mask: Mask, q_len: int, kv_len: int) -> np.ndarray:
        """Say for [place, hop] whether the queries there see nothing of the block that the hop brings."""
        n = self.places
        kinds = mask.block_map(q_len // n, kv_len // n, q_len, kv_len) == EMPTY
        place, hop = np.mgrid[:n, :n]
        return kinds[place, (place - hop) % n]


class _Round:
    """One trip round the ring: whose block is here, where it goes next, and which hops are made."""

    def __init__(self, ring: Ring, q: Array, k: Array, mask: Mask) -> None:
        self.n, self.inner, self.local, self.whole = ring.places, ring.inner, k.shape[1], mask
        lengths = self.n * q.shape[1], self.n * self.local
        self.made, self.empty = ring.hops(mask, *lengths), ring._empty(mask, *lengths)
        # One place alone has static offsets, so that a kernel's lists of visits are constants.
        self.place = jax.lax.axis_index(CONTEXT) // self.inner if self.n > 1 else 0
        self.q_offset = self.place * q.shape[1]

    def blocks(self, k: Array, v: Array) -> Any:
        """Yield (hop, the K and V that are here); the next ones are sent before these are used."""
        here = k, v
        for hop in self.made:
            coming = self.onwards(hop, here) if hop != self.made[-1] else here
            yield hop, here
            here = coming

    def onwards(self, hop: int, arrays: Any, home: bool = False) -> Any:
        """Send arrays from where they are at one hop to where they are at the next one made, or home after the last."""
        after = [h for h in self.made if h > hop] + ([self.n] if home else [])
        shift = (after[0] - hop) % self.n
        if shift == 0:
            return arrays
        devices = self.n * self.inner
        to = [(i, (i + shift * self.inner) % devices) for i in range(devices)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, CONTEXT, to), arrays)

    def first_key(self, hop: int) -> int | Array:
        """Return the position of the first key of the block that is here."""
        return (self.place - hop) % self.n * self.local

    def offsets(self, hop: int) -> tuple[int | Array, int | Array]:
        """Return the positions of the first query and the first key."""
        return self.q_offset, self.first_key(hop)

    def unless_empty(self, hop: int, compute: Callable[..., Any], operands: tuple[Array, ...]) -> Any:
        """Compute a hop, on the devices that have something to compute; elsewhere give what nothing seen gives."""
        idle = self.empty[:, hop]
        if not idle.any():
            return compute(*operands)
        shapes = jax.eval_shape(compute, *operands)
        return jax.lax.cond(jnp.asarray(idle)[self.place], lambda *_: _of_nothing(shapes), compute, *operands)

    def mask(self, hop: int) -> Mask:
        """Cut the mask's arrays to the keys that are here."""
        return jax.tree.map(
            lambda x, letters: self._cut(x, letters.index("S"), hop) if "S" in letters else x,
            self.whole, self.whole.leaf_axes(),
        )  # fmt: skip

    def of_keys(self, bias: Bias, hop: int) -> Bias:
        """Cut a bias to the keys that are here."""
        return bias if bias is None or bias.shape[3] == 1 else self._cut(bias, 3, hop)

    def add_of_keys(self, total: Bias, part: Bias, hop: int) -> Bias:
        """Add the gradient of a cut bias where it was cut from."""
        if total is None or part is None:
            return None
        if total.shape[3] == 1:
            return total + part
        start = self.first_key(hop)
        old = jax.lax.dynamic_slice_in_dim(total, start, self.local, 3)
        return jax.lax.dynamic_update_slice_in_dim(total, old + part, start, 3)

    def _cut(self, x: Array, axis: int, hop: int) -> Array:
        return jax.lax.dynamic_slice_in_dim(jnp.asarray(x), self.first_key(hop), self.local, axis)


def _of_nothing_seen(q: Array) -> tuple[Array, Array]:
    out = jnp.zeros_like(q, jnp.float32)
    return out, jnp.full_like(jnp.swapaxes(out[..., 0], 1, 2), NEG_INF)


def _of_nothing(shapes: Any) -> Any:
    """Give the (out, lse) of a query that sees nothing, or zero gradients, in the given shapes."""
    if isinstance(shapes, tuple) and len(shapes) == 2:
        return jnp.zeros(shapes[0].shape, shapes[0].dtype), jnp.full(shapes[1].shape, NEG_INF, shapes[1].dtype)
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
