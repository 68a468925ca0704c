"""One attention problem as splash takes it: heads first, padded to tiles, one batch row at a time
under `vmap`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn.block_sizes import DKV, DQ, FORWARD, BlockSizes
from maxattn.kernels import mask_split
from maxattn.kernels.base import Offset
from maxattn.kernels.softmax import BIG_LSE
from maxattn.kernels.splash import mask_info

Blocks = tuple[int, ...]  # (q, kv, kv_compute), or (q, kv) for the separate kernel of dq
Ids = tuple[Array, Array] | None  # segment ids of one batch row's queries and keys
Rows = tuple[Array, Array, Array]  # (lse, dout, delta) of one batch row


class Library(Protocol):
    """The kernels of one splash attention, on one batch row: q [N, T, H], k and v [K, S, H], padded
    to tiles.
    """

    def query_factor(self, dtype: Any) -> float:
        """Return what the queries must be multiplied by beside the scale; dk comes back multiplied
        by it.
        """
        ...

    def forward(
        self, q: Array, k: Array, v: Array, ids: Ids, setup: Setup, blocks: Blocks
    ) -> tuple[Array, Array]:
        """Return (out [N, T, H], lse [N, T] float32, natural); an LSE below -1e37 marks rows that
        saw nothing.
        """
        ...

    def dkv(
        self,
        q: Array,
        k: Array,
        v: Array,
        ids: Ids,
        rows: Rows,
        setup: Setup,
        blocks: Blocks,
        fused: bool,
    ) -> tuple[Array | None, Array, Array]:
        """Return (dq when fused else None, dk, dv)."""
        ...

    def dq(
        self, q: Array, k: Array, v: Array, ids: Ids, rows: Rows, setup: Setup, blocks: Blocks
    ) -> Array:
        """Return dq, where the backward is not fused."""
        ...


@dataclass(frozen=True)
class Problem:
    """Hold what every kernel of one call shares.

    Args:
        q: [B, N, T, H], scaled.
        k, v: [B, K, S, H].
        parts: the mask.
        q_offset, kv_offset: position of the first local query and key.
        library: the kernels.
    """

    q: Array
    k: Array
    v: Array
    parts: mask_split.Split
    q_offset: Offset
    kv_offset: Offset
    library: Library

    def forward(self, sizes: BlockSizes) -> tuple[Array, Array]:
        """Return (out [B, N, T, H], lse [B, N, T]); rows with nothing to attend to hold garbage."""
        blocks = _of(sizes, FORWARD)
        setup = self._setup(blocks[0], blocks[1])

        def row(q: Array, k: Array, v: Array, ids: Any) -> tuple[Array, Array]:
            with _usual_arithmetic():
                return self.library.forward(q, k, v, ids, setup, blocks)

        out, lse = jax.vmap(row)(*setup.operands(self))
        return out[:, :, : self.q_len], lse[:, :, : self.q_len]

    def backward(
        self, sizes: BlockSizes, lse: Array, dout: Array, delta: Array
    ) -> tuple[Array, Array, Array]:
        """Return (dq [B, N, T, H] of the scaled queries, dk and dv [B, K, S, H]) in the operands'
        dtype.

        Args:
            sizes: block sizes.
            lse, delta: [B, N, T] float32, finite.
            dout: [B, N, T, H], 0 in rows with nothing to attend to.
        """
        fused, blocks = bool(sizes.use_fused_bwd_kernel), _of(sizes, DKV)
        dkv = self._setup(*blocks[:2])

        def keys(
            q: Array, k: Array, v: Array, ids: Any, lse: Array, dout: Array, delta: Array
        ) -> Any:
            with _usual_arithmetic():
                return self.library.dkv(q, k, v, ids, (lse, dout, delta), dkv, blocks, fused)

        dq, dk, dv = jax.vmap(keys)(*dkv.operands(self), *dkv.rows(lse, dout, delta))
        if not fused:
            dq = self._dq(_of(sizes, DQ), lse, dout, delta)
        return dq[:, :, : self.q_len], dk[:, :, : self.kv_len], dv[:, :, : self.kv_len]

    def _dq(self, blocks: tuple[int, ...], *given: Array) -> Array:
        setup = self._setup(*blocks)

        def queries(
            q: Array, k: Array, v: Array, ids: Any, lse: Array, dout: Array, delta: Array
        ) -> Array:
            with _usual_arithmetic():
                return self.library.dq(q, k, v, ids, (lse, dout, delta), setup, blocks)

        return jax.vmap(queries)(*setup.operands(self), *setup.rows(*given))

    @property
    def q_len(self) -> int:
        """Real local queries."""
        return self.q.shape[2]

    @property
    def kv_len(self) -> int:
        """Real local keys."""
        return self.k.shape[2]

    def checked(self, x: Array) -> Array:
        """Turn a result into NaN where the offsets do not fit the codes that carry them.

        A plan refuses sequences that are too long. Only the device can know a traced offset that no
        context strategy makes: one beyond 2**20, or that is no whole number of key shards.
        """
        valid = self._setup(self.q_len, self.kv_len).valid
        return x if valid is None else jnp.where(valid, x, jnp.nan)

    def _setup(self, block_q: int, block_kv: int) -> Setup:
        offsets = self.q_offset, self.kv_offset
        padded = -(-self.q_len // block_q) * block_q, -(-self.kv_len // block_kv) * block_kv
        kinds = mask_split.tile_kinds(
            self.parts.positions, block_q, block_kv, self.q_len, self.kv_len, *offsets
        )
        # Segment ids hide padded keys as well, and then the positions need not.
        shows_padding = padded[1] > self.kv_len and not self.parts.has_ids
        rows = mask_info.rows_of(
            self.parts.positions, kinds, self.q_len, self.kv_len, shows_padding, *offsets
        )
        ids = mask_split.segment_ids(
            self.parts, self.q.shape[0], self.q_len, self.kv_len, self.kv_offset
        )
        return Setup(kinds, rows, ids, padded, shows_padding)


@dataclass(frozen=True)
class Setup:
    """Hold what one kernel with its own block sizes takes beside q, k and v."""

    kinds: mask_split.Kinds
    codes: Any
    ids: tuple[Array, Array] | None
    padded: tuple[int, int]
    shows_padding: bool = (
        False  # padded keys are hidden by the code, so tiles that hold them must evaluate it
    )

    @property
    def code(self) -> Callable[..., Any] | None:
        """The function that the kernel calls, or None where every pair is allowed."""
        return None if self.codes is None else self.codes.code

    @property
    def valid(self) -> Array | None:
        """Whether the codes could hold the offsets; None: known to."""
        return None if self.codes is None else self.codes.valid

    def operands(self, problem: Problem) -> tuple[Array, Array, Array, Any]:
        """Pad (q, k, v, segment ids) to whole tiles; ids that pad match nothing."""
        t, s = self.padded
        ids = None
        if self.ids is not None:
            ids = (
                _pad(self.ids[0], 1, t, mask_split.QUERY_PAD),
                _pad(self.ids[1], 1, s, mask_split.KEY_PAD),
            )
        return _pad(problem.q, 2, t), _pad(problem.k, 2, s), _pad(problem.v, 2, s), ids

    def rows(self, lse: Array, dout: Array, delta: Array) -> tuple[Array, Array, Array]:
        """Pad (lse, dout, delta) so that the rows added have no gradient."""
        t = self.padded[0]
        return _pad(lse, 2, t, BIG_LSE), _pad(dout, 2, t), _pad(delta, 2, t)


@contextmanager
def _usual_arithmetic() -> Iterator[None]:
    """Keep 64-bit mode and forbidden promotion off the libraries: their index arithmetic fails
    under either.
    """
    with (
        jax.enable_x64(False),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
    ):
        yield


def _of(sizes: BlockSizes, keys: tuple[str, ...]) -> tuple[int, ...]:
    found = sizes.part(keys)
    assert found is not None, (sizes, keys)  # build() asks for the sizes of training
    return found


def _pad(x: Array, axis: int, length: int, value: float = 0) -> Array:
    extra = length - x.shape[axis]
    widths = [(0, extra if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value) if extra else x
