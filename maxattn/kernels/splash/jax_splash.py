"""The kernels of JAX's splash attention on one batch row."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Array

from maxattn.jax_private import splash as jax_splash
from maxattn.kernels.splash import scalar_memory
from maxattn.kernels.splash.calls import Blocks, Library, Operands, Setup, Stats
from maxattn.kernels.splash.mask_info import mask_info


@dataclass(frozen=True)
class JaxSplash(Library):
    """Call JAX's splash kernels, in Pallas' interpreter if `interpret`."""

    interpret: bool

    def forward(self, row: Operands, setup: Setup, blocks: Blocks) -> tuple[Array, Array]:
        return jax_splash.forward(row, self._launch(setup, blocks))

    def dkv(
        self, row: Operands, stats: Stats, setup: Setup, blocks: Blocks, fused: bool
    ) -> tuple[Array | None, Array, Array]:
        # The fused kernel writes a partial dQ at every step, so its grid keeps all steps.
        launch = self._launch(setup, blocks, by_key=True, shrink=not fused)
        return jax_splash.dkv(row, stats, launch, fused)

    def dq(self, row: Operands, stats: Stats, setup: Setup, blocks: Blocks) -> Array:
        return jax_splash.dq(row, stats, self._launch(setup, blocks))

    def _launch(self, setup: Setup, blocks: Blocks, **order: bool) -> jax_splash.SplashLaunch:
        info = mask_info(setup.kinds, setup.codes, setup.padded[0], **order)
        if not self.interpret and info.data_next is not None:
            # A plan checks a forward's lists; those of a backward can be longer.
            _, rows, columns = info.data_next.shape
            item = info.data_next.dtype.itemsize
            rule = scalar_memory.too_long(scalar_memory.list_bytes(rows, columns, item))
            if rule is not None:
                raise scalar_memory.unsupported(blocks, rule)
        return jax_splash.SplashLaunch(info, setup.code, blocks, self.interpret)
