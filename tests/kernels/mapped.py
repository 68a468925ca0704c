"""Calls under `vmap` with some operands mapped, and the expected results of each example."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.cases import compare
from tests.reference import attention64

Axes = tuple[int | None, ...]


class Mapped(NamedTuple):
    """The sizes of an example, and the tolerance of its results against float64."""

    b: int
    t: int
    s: int
    n: int
    k: int
    h: int
    scale: float
    dtype: str = "float32"
    within: float = 2e-5

    def drawn(self, axes: Axes, many: tuple[int, ...]) -> list[Any]:
        """Draw q, k, v, lengths and dout; `many` examples along `axes` for the first four."""
        rng, (b, t, s, n, k, h, *_) = np.random.default_rng(5), self
        made = []
        for shape, axis in zip(
            ((b, t, n, h), (b, s, k, h), (b, s, k, h), (b, t, n, h)), (*axes[:3], 0), strict=True
        ):
            size = shape if axis is None else (*shape[:axis], *many, *shape[axis:])
            made.append(jnp.asarray(rng.normal(size=size), self.dtype))
        ends = rng.integers(2, s + 1, (b,) if axes[3] is None else (*many, b))
        return [*made[:3], jnp.asarray(ends, jnp.int32), made[3]]

    def wanted(self, x: Any, pairs: Any) -> Any:
        """Compute an example's results in float64."""
        q, k, v, _, dout = x
        shape = self.b, 1, self.t, self.s
        return attention64(q, k, v, np.broadcast_to(pairs, shape), scale=self.scale, dout=dout)

    def judge(self, got: Any, x: Any, pairs: Any) -> None:
        """Compare an example's output and gradients with float64."""
        out, *grads = got
        compare((out, None, *grads), self.wanted(x, pairs), self.within)

    def real(self, lengths: Any) -> np.ndarray:
        """Return which keys are not padding, [B, 1, 1, S]."""
        return np.arange(self.s) < np.asarray(lengths)[:, None, None, None]


def one_of(x: list[Any], axes: Axes, *at: int) -> list[Any]:
    """Return one example of mapped operands; the last is mapped along axis 0."""
    for i in at:
        x = [y if a is None else jnp.take(y, i, a) for y, a in zip(x, (*axes[:4], 0), strict=True)]
    return x


def step(attend: Any) -> Any:
    """Return a function of q, k, v, lengths and dout that gives the output and the gradients."""

    def both(q: Any, k: Any, v: Any, ends: Any, dout: Any) -> Any:
        out, pull = jax.vjp(lambda *x: attend(*x, ends), q, k, v)
        return out, *pull(dout)

    return both
