"""Small layers of transformers, and tokens with an output that the next norm adds to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

import maxattn as ma
from maxattn import sharding
from maxattn.modules import GatedBranch, ModulationRow, adaptive_norm, gated_sum
from maxattn.steps import are_stacked


class FeedForward(nnx.Module):
    """Two layers with a gelu between; their parameters name mesh axes as attention's do.

    Args:
        out: default `dim`.
        approximate: use the tanh form of gelu.
    """

    diffusers_names: ClassVar[dict[str, str]] = {"up": "net.0.proj", "down": "net.2"}

    def __init__(
        self,
        dim: int,
        inner: int,
        out: int | None = None,
        *,
        approximate: bool = True,
        rngs: nnx.Rngs,
        **how: Any,
    ) -> None:
        self.approximate, how = approximate, {"rngs": rngs, **how}
        self.up = nnx.Linear(dim, inner, kernel_metadata=on_mesh("fsdp", "tensor"), **how)
        self.down = nnx.Linear(inner, out or dim, kernel_metadata=on_mesh("tensor", "fsdp"), **how)

    def __call__(self, x: Float[Array, "... C"]) -> Float[Array, "... C"]:
        """Run both layers on every token."""
        if x.ndim == 3 and x.shape[0] == 1:
            # With a batch axis of one, XLA for GPUs transposes what the gradient of `up` saves.
            return self(x[0])[None]
        return self.down(nnx.gelu(self.up(x), approximate=self.approximate))


class Embedding(nnx.Module):
    """Two layers with an activation between, for times or texts.

    Args:
        gelu: the activation is tanh gelu, for texts; else silu, for times.
    """

    def __init__(self, width: int, dim: int, gelu: bool, *, rngs: nnx.Rngs, **how: Any) -> None:
        self.gelu = gelu
        self.linear_1 = nnx.Linear(width, dim, rngs=rngs, **how)
        self.linear_2 = nnx.Linear(dim, dim, rngs=rngs, **how)

    def __call__(self, x: Float[Array, "... C"]) -> Float[Array, "... D"]:
        """Run both layers."""
        x = self.linear_1(x)
        return self.linear_2(nnx.gelu(x) if self.gelu else nnx.silu(x))


def norm32(dim: int, eps: float, learned: bool, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Make a layer norm that computes in float32 for inputs of any dtype.

    Args:
        learned: whether it has a scale and a bias; if not, modulation applies them.
    """
    how: dict[str, Any] = {"use_bias": learned, "use_scale": learned, "use_fast_variance": False}
    return nnx.LayerNorm(dim, epsilon=eps, dtype=jnp.float32, rngs=rngs, **how)


def project_parts(
    linear: nnx.Linear, parts: Sequence[Float[Array, "B T C"]]
) -> Float[Array, "B T D"]:
    """Compute concatenate(parts) @ kernel without the concatenated array.

    The bias is not added: with it, XLA for GPUs copies each part's rows of the kernel.

    Args:
        parts: with the channels of the linear layer's input, in order.
    """
    kernel, dtype = linear.kernel[...].astype(linear.dtype), linear.dtype
    y, first = jnp.zeros((), dtype), 0
    for part in parts:
        last = first + part.shape[-1]
        y = y + part.astype(dtype) @ kernel[first:last]
        first = last
    return y


def sinusoids(
    t: Float[Array, "..."], dim: int, max_period: float = 1e4
) -> Float[Array, "... {dim}"]:
    """Embed times as cosines, then sines, of geometrically spaced frequencies.

    Args:
        t: times 0 to 1000, or pixels.
        max_period: ratio of the longest period to the shortest.
    """
    half = dim // 2
    # Models were trained with exponents rounded to float32, which large numbers show in an angle.
    exponents = np.float32(-np.log(max_period)) * np.arange(half, dtype=np.float32)
    exponents = (exponents / np.float32(half)).astype(np.float64)
    frequencies = jnp.asarray(np.exp(exponents).astype(np.float32))
    angles = jnp.multiply.outer(t.astype(jnp.float32), frequencies)
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def on_mesh(*axes: str | None) -> dict[str, Any]:
    """Name the mesh axes of a parameter; none need exist when the parameter is made."""
    return sharding.on_axes(*axes)


# ---- tokens and a layer's branch, added in one pass over memory ----------------------------------

Tokens = Float[Array, "B T D"]


class Residual(NamedTuple):
    """Tokens, and a layer's output that is not yet added to them."""

    x: Tokens
    branch: GatedBranch | None = None

    @property
    def total(self) -> Tokens:
        """Return the tokens with the branch added."""
        return self.x if self.branch is None else gated_sum(self.x, self.branch)

    def normed(
        self,
        norm: nnx.LayerNorm,
        scale: ModulationRow | None = None,
        shift: ModulationRow | None = None,
        mesh: Any = None,
    ) -> tuple[Tokens, Tokens]:
        """Return the total, and the total after a norm; arguments as for `adaptive_norm`."""
        return adaptive_norm(self.x, norm, scale, shift, branch=self.branch, mesh=mesh)


def residual(x: Tokens | Residual) -> Residual:
    """Wrap tokens in a `Residual` without a branch; return a `Residual` unchanged."""
    return x if isinstance(x, Residual) else Residual(x)


def left_open(layers: Any, config: ma.AttentionConfig | None) -> bool:
    """Check whether layers return a branch that is not added: if each is compiled alone.

    If the backward recomputes a layer, both tokens and branch would be saved for it.

    Args:
        layers: from `make_layers`.
    """
    recomputes = config is not None and config.remat_policy != "NONE"
    return not are_stacked(layers) and not recomputes


def rows_of(table: Float[Array, "#B #F R D"], base: Any = None) -> Iterator[ModulationRow]:
    """Yield the rows of a modulation table, in order.

    Args:
        table: computed from the times.
        base: the block's learned table, [1, R, D], which is added; default none.
    """
    learned = None if base is None else jnp.asarray(base)[:, None]
    return (ModulationRow(table, row, learned) for row in range(table.shape[2]))
