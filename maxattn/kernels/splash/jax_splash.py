"""The kernels of JAX's splash attention on one batch row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxtyping import Array

from maxattn.errors import Unsupported
from maxattn.jax_private import splash as jax_splash
from maxattn.kernels.splash import scalar_memory
from maxattn.kernels.splash.calls import Blocks, Operands, Setup, Stats
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

    def forward(self, row: Operands, setup: Setup, blocks: Blocks) -> tuple[Array, Array]:
        """Return (out [N, T, H], lse [N, T])."""
        return jax_splash.forward(row, self._launch(setup, blocks))

    def dkv(
        self, row: Operands, stats: Stats, setup: Setup, blocks: Blocks, fused: bool
    ) -> tuple[Array | None, Array, Array]:
        """Return (dq when fused else None, dk, dv)."""
        # The fused kernel writes a share of dq at every step, so its grid keeps the steps that
        # compute nothing.
        launch = self._launch(setup, blocks, by_key=True, shrink=not fused)
        return jax_splash.dkv(row, stats, launch, fused)

    def dq(self, row: Operands, stats: Stats, setup: Setup, blocks: Blocks) -> Array:
        """Return dq."""
        return jax_splash.dq(row, stats, self._launch(setup, blocks))

    def _launch(self, setup: Setup, blocks: Blocks, **order: bool) -> jax_splash.SplashLaunch:
        info = mask_info(setup.kinds, setup.codes, setup.padded[0], **order)
        if not self.interpret and info.data_next is not None:
            _check_lists(info.data_next, blocks)
        return jax_splash.SplashLaunch(info, setup.code, blocks, self.interpret)


def _check_lists(listed: Array, blocks: Blocks) -> None:
    """Refuse lists that scalar memory does not hold: a backward's can be longer than a forward's.

    Raises:
        Unsupported: naming the tile.
    """
    _, rows, columns = listed.shape
    rule = scalar_memory.too_long(scalar_memory.list_bytes(rows, columns, listed.dtype.itemsize))
    if rule is not None:
        tile = f"{blocks[0]} queries x {blocks[1]} keys"
        raise Unsupported("flash_block_sizes", tile, rule, scalar_memory.REMEDY)
