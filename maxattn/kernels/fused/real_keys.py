"""The real keys of a call, at the front: kernels that take lengths then need no flags."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Int

from maxattn.kernels.base import Inputs
from maxattn.masks.terms import Terms


@dataclass(frozen=True)
class RealKeys:
    """Hold how many local keys are real, and where they are when that is not at the front.

    Args:
        lengths: of each batch row; None where all keys are real.
        order: the real keys, then the others; None where they stand so already.
    """

    lengths: Int[Array, " B"] | None
    order: Int[Array, "B S"] | None

    @classmethod
    def of(cls, terms: Terms, inputs: Inputs) -> RealKeys:
        """Read limits, lengths and flags of keys from the terms of a mask."""
        batch, kv_len = inputs.q.shape[0], inputs.k.shape[1]
        lengths = terms.lengths(batch, kv_len, inputs.kv_offset)
        if not terms.has_flags:
            return cls(lengths, None)
        real = terms.real_keys(kv_len, inputs.kv_offset)
        order = jnp.argsort(~real, axis=1, stable=True)
        return cls(lengths, jnp.broadcast_to(order, (batch, kv_len)))

    def packed(self, x: Array) -> Array:
        """Gather the real keys to the front."""
        if self.order is None:
            return x
        return jnp.take_along_axis(x, self.order[:, :, None, None], axis=1)

    def unpacked(self, x: Array) -> Array:
        """Put gradients of keys back where the keys came from."""
        if self.order is None:
            return x
        return jnp.take_along_axis(x, jnp.argsort(self.order, axis=1)[..., None, None], 1)
