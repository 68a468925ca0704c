"""The kernels of JAX's splash attention on one batch row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxtyping import Array

from maxattn.jax_private import splash as jax_splash
from maxattn.kernels.splash.calls import Blocks, Ids, Rows, Setup
from maxattn.kernels.splash.mask_info import mask_info


@dataclass(frozen=True)
class JaxSplash:
    """Call the kernels.

    Args:
        interpret: run in Pallas' interpreter.
    """

    interpret: bool

    def query_factor(self, dtype: Any) -> float:
        """Take the queries as they are."""
        return 1.0

    def forward(
        self, q: Array, k: Array, v: Array, ids: Ids, setup: Setup, blocks: Blocks
    ) -> tuple[Array, Array]:
        """Return (out [N, T, H], lse [N, T])."""
        info = mask_info(setup.kinds, setup.codes, setup.padded[0])
        return jax_splash.forward(q, k, v, _ids(ids), info, setup.code, blocks, self.interpret)

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
        # The fused kernel writes a part of dq at every step, so its grid keeps the steps that
        # compute nothing.
        info = mask_info(setup.kinds, setup.codes, setup.padded[0], by_key=True, shrink=not fused)
        return jax_splash.dkv(
            q, k, v, _ids(ids), rows, info, setup.code, blocks, fused, self.interpret
        )

    def dq(
        self, q: Array, k: Array, v: Array, ids: Ids, rows: Rows, setup: Setup, blocks: Blocks
    ) -> Array:
        """Return dq."""
        info = mask_info(setup.kinds, setup.codes, setup.padded[0])
        return jax_splash.dq(q, k, v, _ids(ids), rows, info, setup.code, blocks, self.interpret)


def _ids(ids: Ids) -> Any:
    return None if ids is None else jax_splash.segment_ids(*ids)
