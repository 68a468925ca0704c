"""One trip round a ring: whose keys are here, where they go next, and which pieces of attention are
computed.

Inside `shard_map`. A place holds one run of the sequence, or two under zig-zag; a piece is one run
of queries against one run of keys, at their own positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn.context_parallel.all_gather import CONTEXT
from maxattn.context_parallel.ring.zigzag import Deal, Layout, joined
from maxattn.kernels.base import Bias, Rows
from maxattn.masks import Mask

Keys = list[tuple[Array, Array]]
"""K and V of each run that is here."""


def in_step(coming: Any, results: Any) -> Any:
    """Let what comes be used, and what follows be computed, only when these results are there.

    The compiler knows no duration of a kernel: it would cover a transfer with sums alone, and run
    the kernel before or after it. With nothing else to put between a transfer's start and its end,
    the kernel goes there.
    """
    return jax.lax.optimization_barrier((coming, results))


class Trip:
    """Hold what every hop of one trip shares.

    Args:
        layout: the ring's places and runs.
        inner: neighbouring devices that are one place.
        q, k: this place's shards, in contiguous order.
        mask: this place's queries, all keys.
        bias: the same.
    """

    def __init__(
        self, layout: Layout, inner: int, q: Array, k: Array, mask: Mask, bias: Bias
    ) -> None:
        self.layout, self.inner, self.n = layout, inner, layout.places
        lengths = self.n * q.shape[1], self.n * k.shape[1]
        self.empty, self.full = layout.empty(mask, *lengths), layout.full(mask, *lengths)
        self.made = layout.hops(mask, *lengths)
        # One place alone has static offsets, so that a kernel's lists of visits are constants.
        self.place = jax.lax.axis_index(CONTEXT) // inner if self.n > 1 else 0
        self.deal = Deal(layout, CONTEXT, inner, self.place)
        self.q_run, self.kv_run = q.shape[1] // layout.runs, k.shape[1] // layout.runs
        self.tall = (
            bias is not None and bias.shape[2] == q.shape[1]
        )  # else it broadcasts over queries
        self.masks, self.biases = self._masks(mask), self._biases(bias)

    @property
    def runs(self) -> range:
        """Count the runs of a place."""
        return range(self.layout.runs)

    @property
    def is_dense(self) -> bool:
        """Tell whether every query sees every key, with nothing added to the scores."""
        return (
            self.layout.runs == 1
            and all(m.is_full for m in self.masks)
            and all(b is None for b in self.biases)
        )

    # ---- what is here ----------------------------------------------------------------------------

    def keys(self, k: Array, v: Array) -> Keys:
        """Deal out K and V."""
        return list(zip(self.deal.out(k, 1), self.deal.out(v, 1), strict=True))

    def deal_rows(self, rows: Rows) -> list[Rows]:
        """Deal out what a backward needs of each query."""
        # [B, T, N, H] and [B, N, T]
        dealt = (self.deal.out(x, a) for x, a in zip(rows.operands, (1, 2, 1, 2), strict=True))
        return [Rows(*run) for run in zip(*dealt, strict=True)]

    def pieces(
        self, hop: int, compute: Callable[[int, int], Any], nothing: Callable[[Any], Any]
    ) -> dict[tuple[int, int], Any]:
        """Compute a hop.

        Args:
            hop: which.
            compute: from (query run, key run) to arrays.
            nothing: what it gives where nothing is seen, from the shapes.

        Returns:
            Arrays by (query run, key run), for every piece in which some place sees something.
        """
        all_pairs = [(i, j) for i in self.runs for j in self.runs]
        made = [piece for piece in all_pairs if not self.empty[:, hop, *piece].all()]
        return {piece: self._where_seen(hop, piece, compute, nothing) for piece in made}

    def _where_seen(
        self,
        hop: int,
        piece: tuple[int, int],
        compute: Callable[[int, int], Any],
        nothing: Callable[[Any], Any],
    ) -> Any:
        """Compute a piece on the places that see something in it."""
        idle = self.empty[:, hop, *piece]
        if not idle.any():
            return compute(*piece)
        shapes = jax.eval_shape(lambda: compute(*piece))
        results = lambda: jax.tree.map(lambda x, s: x.astype(s.dtype), nothing(shapes), shapes)  # noqa: E731
        return jax.lax.cond(jnp.asarray(idle)[self.place], results, lambda: compute(*piece))

    def first_key(self, hop: int, j: int) -> Any:
        """Return the position of the first key of run j of the block that is here."""
        return self.layout.chunk((self.place - hop) % self.n, j) * self.kv_run

    def operands(self, hop: int, i: int, j: int) -> Any:
        """Return (bias, mask, position of the first query, of the first key) of a piece."""
        start = self.first_key(hop, j)
        mask, bias = self.masks[i], self.biases[i]
        if (self.full | self.empty)[:, hop, i, j].all():
            # Off the diagonal positions forbid nothing where anything is seen: the kernel need not
            # test them.
            mask = joined(term for term in mask.terms() if term.has_data)
        cut = jax.tree.map(
            lambda x, a: self._cut(x, a.index("S"), start) if "S" in a else x,
            mask,
            mask.leaf_axes(),
        )
        if bias is not None and bias.shape[3] > 1:
            bias = self._cut(bias, 3, start)
        return bias, cut, self.layout.chunk(self.place, i) * self.q_run, start

    # ---- what travels ----------------------------------------------------------------------------

    def send_on(self, hop: int, keys: Any) -> Any:
        """Send K and V to where the next hop computes with them; after the last one they stay."""
        return keys if hop == self.made[-1] else self.sent(keys, self._next(hop) - hop)

    def send_home(self, hop: int, grads: Any) -> Any:
        """Send what belongs to the keys that are here along with them, and home after the last
        hop.
        """
        return self.sent(grads, self._next(hop) - hop)

    def send_to_owner(self, hop: int, grads: Any) -> Any:
        """Send what belongs to the keys that are here straight to the place they came from."""
        return self.sent(grads, self.n - hop)

    def _next(self, hop: int) -> int:
        """Return the next hop that is made; n, which is at home, after the last."""
        return next((h for h in self.made if h > hop), self.n)

    def sent(self, arrays: Any, places: int) -> Any:
        """Send arrays on by so many places."""
        if places % self.n == 0:
            return arrays
        return jax.tree.map(
            lambda x: jax.lax.ppermute(x, CONTEXT, self.moves(places % self.n)), arrays
        )

    def moves(self, places: int) -> list[tuple[int, int]]:
        """List (from, to) of every device, for arrays that move on by so many places."""
        devices = self.n * self.inner
        return [(i, (i + places * self.inner) % devices) for i in range(devices)]

    # ---- masks and biases ------------------------------------------------------------------------

    def add_bias(self, total: Bias, part: Bias, hop: int, j: int) -> Bias:
        """Add the gradient of a piece's bias where it was cut from."""
        if total is None or part is None:
            return None
        if total.shape[3] == 1:
            return total + part
        start = self.first_key(hop, j)
        old = jax.lax.dynamic_slice_in_dim(total, start, self.kv_run, 3)
        return jax.lax.dynamic_update_slice_in_dim(total, old + part, start, 3)

    def whole_bias(self, totals: list[Bias]) -> Bias:
        """Join the gradients of the runs' biases: in order where each query has its own, summed
        where it is shared.
        """
        found = [x for x in totals if x is not None]
        if not found:
            return None
        return self.deal.back(found, 2) if self.tall else sum(found[1:], found[0])

    def _biases(self, bias: Bias) -> list[Bias]:
        if bias is None or not self.tall:
            return [bias for _ in self.runs]
        return list(self.deal.out(bias, 2))

    def _masks(self, mask: Mask) -> list[Mask]:
        leaves, tree = jax.tree.flatten(mask)
        axes = jax.tree.leaves(mask.leaf_axes())
        dealt = [self._of_queries(x, a) for x, a in zip(leaves, axes, strict=True)]
        return [jax.tree.unflatten(tree, [x[i] for x in dealt]) for i in self.runs]

    def _of_queries(self, x: Any, letters: str) -> list[Any]:
        return (
            self.deal.out(jnp.asarray(x), letters.index("T"))
            if "T" in letters
            else [x for _ in self.runs]
        )

    def _cut(self, x: Any, axis: int, start: Any) -> Array:
        return jax.lax.dynamic_slice_in_dim(jnp.asarray(x), start, self.kv_run, axis)
