"""One pass round a ring: the keys on each rank, their next rank, and the pieces of each hop.

A pass runs inside `shard_map`. A rank has one chunk of the sequence, or two in zig-zag order. A
piece is the attention of one chunk of queries to one chunk of keys, at their own positions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from maxattn.context_parallel.base import CONTEXT, Collective, bias_letters
from maxattn.context_parallel.ring.zigzag import ChunkLayout, ChunkOrder, joined
from maxattn.kernels.base import Bias, Inputs, Result, Rows
from maxattn.kernels.softmax import NEG_INF
from maxattn.masks import Mask

Piece = tuple[int, int]
"""(query chunk, key chunk)"""
Keys = list[tuple[Array, Array]]
"""K and V of each chunk on this device."""


def tie_transfer_to_kernel(received: Any, computed: Any) -> Any:
    """Return both arguments behind a barrier: neither is used before both are computed.

    The compiler does not know the duration of a kernel: it would overlap a transfer with sums
    alone, and run the kernel before or after both. If nothing else can overlap the transfer, the
    kernel does.
    """
    return jax.lax.optimization_barrier((received, computed))


class RingPass:
    """The state shared by all hops of one pass.

    Args:
        layout: the ring's ranks and chunks.
        group: number of neighbouring devices that form one rank.
        inputs: this rank's shards of q, k and v, in contiguous order; a mask and a bias of this
            rank's queries and all keys.
        way: direction. Hop h brings each rank the K and V of the rank h places before it if `way`
            is 1, and of the rank h places after it if -1.
    """

    def __init__(self, layout: ChunkLayout, group: int, inputs: Inputs, way: int = 1) -> None:
        mask, q_len, kv_len = inputs.mask, inputs.q.shape[1], inputs.k.shape[1]
        self.layout, self.group, self.ring_size, self.way = layout, group, layout.ring_size, way
        lengths = self.ring_size * q_len, self.ring_size * kv_len
        # before[hop]: how many places before a rank its keys come from, which numbers layout hops.
        before = way * np.arange(self.ring_size) % self.ring_size
        self.empty = layout.empty(mask, *lengths)[:, before]
        # Pieces in which a kernel need not test positions.
        self.untested = self.empty | layout.full(mask, *lengths)[:, before]
        made = layout.hops(mask, *lengths)
        self.hops = tuple(hop for hop in range(self.ring_size) if before[hop] in made)
        # A ring of one has static offsets, so that a kernel's lists of tiles are constants.
        self.rank = jax.lax.axis_index(CONTEXT) // group if self.ring_size > 1 else 0
        self.order = ChunkOrder(layout, group, self.rank)
        self.q_chunk, self.kv_chunk = (n // layout.chunks_per_rank for n in (q_len, kv_len))
        both = inputs.bias, inputs.bias_level
        bias, level = (None if x is None else bias_letters(x.shape) for x in both)
        self.has_bias_rows = bias is not None and "T" in bias  # else it broadcasts over queries
        self.biases, self.levels = self._by_chunk(both[0], bias), self._by_chunk(both[1], level)
        self.masks = self._by_chunk(mask, mask.leaf_axes())
        self._shapes: dict[Hashable, Any] = {}

    @property
    def chunks(self) -> range:
        """The indices of a rank's chunks."""
        return range(self.layout.chunks_per_rank)

    @property
    def is_dense(self) -> bool:
        """Whether every query sees every key, without a bias."""
        plain = all(m.is_full for m in self.masks) and all(b is None for b in self.biases)
        return self.layout.chunks_per_rank == 1 and plain

    # ---- chunks ----------------------------------------------------------------------------------

    def keys(self, inputs: Inputs) -> Keys:
        """Split K and V into chunks."""
        k, v = self.order.to_zigzag(inputs.k, 1), self.order.to_zigzag(inputs.v, 1)
        return list(zip(k, v, strict=True))

    def rows(self, rows: Rows) -> list[Rows]:
        """Split the backward's `Rows` into query chunks."""
        axes = 1, 2, 1, 2  # axis of T in [B, T, N, H] and [B, N, T]
        chunks = (self.order.to_zigzag(x, a) for x, a in zip(rows.operands, axes, strict=True))
        return [Rows(*chunk) for chunk in zip(*chunks, strict=True)]

    def result(self, results: Iterable[tuple[Array, Array]], like: Array) -> Result:
        """Join the results of the query chunks, in the dtype of `like`."""
        outs, lses = zip(*results, strict=True)
        out = self.order.from_zigzag([x.astype(like.dtype) for x in outs], 1)
        return Result(out, self.order.from_zigzag(list(lses), 2))

    # ---- what a hop computes ---------------------------------------------------------------------

    def pieces(
        self, hop: int, compute: Callable[[int, int], Any], alike: Hashable = None
    ) -> dict[Piece, Any]:
        """Compute the pieces of a hop, except for those that the mask leaves empty on every rank.

        `compute` returns the `Result` or `Grads` of a query chunk and a key chunk. Calls with equal
        `alike` have results of equal shapes in every hop.
        """
        found = {}
        for i, j in ((i, j) for i in self.chunks for j in self.chunks):
            idle = self.empty[:, hop, i, j]
            if idle.all():
                continue
            run, key = partial(compute, i, j), (alike, bool(self.untested[:, hop, i, j].all()))
            if not idle.any():
                found[i, j] = made = run()
                self._shapes.setdefault(key, jax.eval_shape(lambda made=made: made))
                continue
            if key not in self._shapes:  # tracing a kernel takes long: trace once for all hops
                self._shapes[key] = jax.eval_shape(run)

            def empty(shapes: Any = self._shapes[key]) -> Any:
                """Return the results of queries that see no key."""
                zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
                if isinstance(shapes, Result):
                    return zeros._replace(lse=jnp.full_like(zeros.lse, NEG_INF))
                return zeros

            found[i, j] = jax.lax.cond(jnp.asarray(idle)[self.rank], empty, run)
        return found

    def inputs(self, hop: int, piece: Piece, q: Array, kv: tuple[Array, Array]) -> Inputs:
        """Return the kernel's operands for a piece."""
        start = self.first_key(hop, piece[1])
        bias, mask = self._bias_and_mask(hop, piece, start)
        first_query = self.layout.chunk(self.rank, piece[0]) * self.q_chunk
        return Inputs(q, *kv, bias, mask, first_query, start, self.levels[piece[0]])

    def first_key(self, hop: int, j: int) -> Any:
        """Return the position of the first key of chunk j of the current block."""
        return self.layout.chunk((self.rank - self.way * hop) % self.ring_size, j) * self.kv_chunk

    # ---- transfers -------------------------------------------------------------------------------

    def send_on(self, hop: int, keys: Any) -> Any:
        """Send K and V to the rank that needs them in the next hop, if there is one."""
        return keys if hop == self.hops[-1] else self.send_home(hop, keys)

    def send_home(self, hop: int, grads: Any) -> Any:
        """Send gradients along with their keys; after the last hop, to the keys' owner."""
        following = next((h for h in self.hops if h > hop), self.ring_size)
        return self.sent(grads, following - hop)

    def send_to_owner(self, hop: int, grads: Any) -> Any:
        """Send gradients of the current keys straight to the rank that owns these keys."""
        return self.sent(grads, self.ring_size - hop)

    def sent(self, arrays: Any, ranks: int) -> Any:
        """Send arrays `ranks` ranks further, in this pass's direction."""
        if ranks % self.ring_size == 0:
            return arrays
        devices, by = self.ring_size * self.group, self.way * ranks * self.group
        moves = [(i, (i + by) % devices) for i in range(devices)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, CONTEXT, moves), arrays)

    # ---- masks and biases ------------------------------------------------------------------------

    def add_bias(self, total: Bias, part: Bias, hop: int, j: int) -> Bias:
        """Add the gradient of a piece's bias to the piece's part of `total`."""
        if total is None or part is None:
            return None
        if total.shape[3] == 1:
            return total + part
        start = self.first_key(hop, j)
        old = jax.lax.dynamic_slice_in_dim(total, start, self.kv_chunk, 3)
        return jax.lax.dynamic_update_slice_in_dim(total, old + part, start, 3)

    def whole_bias(self, totals: list[Bias]) -> Bias:
        """Join the bias gradients of the query chunks, or sum them if the chunks share the bias."""
        found = [x for x in totals if x is not None]
        if not found:
            return None
        return self.order.from_zigzag(found, 2) if self.has_bias_rows else sum(found[1:], found[0])

    def _bias_and_mask(self, hop: int, piece: Piece, start: Any) -> tuple[Bias, Mask]:
        i, j = piece
        mask, bias = self.masks[i], self.biases[i]
        if self.untested[:, hop, i, j].all():
            mask = joined(term for term in mask.terms() if term.has_data)

        def of_keys(x: Any, axis: int) -> Array:
            return jax.lax.dynamic_slice_in_dim(jnp.asarray(x), start, self.kv_chunk, axis)

        mask = jax.tree.map(
            lambda x, letters: of_keys(x, letters.index("S")) if "S" in letters else x,
            mask, mask.leaf_axes(),
        )  # fmt: skip
        return of_keys(bias, 3) if bias is not None and bias.shape[3] > 1 else bias, mask

    def _by_chunk(self, tree: Any, letters: Any) -> list[Any]:
        """Split arrays by query chunk along their axis "T"; `letters` names their axes."""
        leaves, structure = jax.tree.flatten(tree)
        parts = [
            self.order.to_zigzag(jnp.asarray(x), axes.index("T")) if "T" in axes
            else [x for _ in self.chunks]
            for x, axes in zip(leaves, jax.tree.leaves(letters), strict=True)
        ]  # fmt: skip
        return [jax.tree.unflatten(structure, [x[i] for x in parts]) for i in self.chunks]


def unseen(queries: Array, value_dim: int) -> Result:
    """Return the result of queries [B, T, N, H] before their first key; out is [B, T, N, V]."""
    b, t, n, _ = queries.shape
    return Result(
        jnp.zeros((b, t, n, value_dim), jnp.float32), jnp.full((b, n, t), NEG_INF, jnp.float32)
    )


def hop_collectives(
    sends: int, block: int, home: tuple[int, int], arrays: int
) -> tuple[Collective, ...]:
    """List `sends` hops of K and V in `arrays` arrays; `home` is (hops, bytes) of dK and dV."""
    hops, grads = home
    made = (
        ("K,V", "forward", sends * block, sends),
        ("K,V", "backward", sends * block, sends),
        ("dK,dV", "backward", hops * grads, hops),
    )
    return tuple(Collective("ppermute", (CONTEXT,), *each, arrays) for each in made)
