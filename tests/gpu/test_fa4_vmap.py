"""FlashAttention-4 over all pairs under vmap: one launch, with the mapped axes in the batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxattn.kernels.fa4 import block_sparse
from maxattn.kernels.fa4.block_sparse import TilePass
from maxattn.kernels.fa4.tile_sizes import Tile


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (1, 0, None)])
def test_a_mapped_axis_becomes_part_of_the_batch(
    axes: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = []

    def forward(q: Any, k: Any, v: Any, tiles: TilePass) -> Any:
        launches.append((q.shape, k.shape, tiles))
        scores = tiles.scale * jnp.einsum("btnh,bsnh->bnts", q, k)
        out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)
        return out, jax.nn.logsumexp(scores, axis=-1)

    monkeypatch.setattr(block_sparse, "forward", forward)
    rng, tiles = np.random.default_rng(0), TilePass(Tile(192, 128), 0.5)
    shapes = [(2, length, 4, 8) for length in (5, 7, 7)]
    mapped = [s if a is None else (*s[:a], 3, *s[a:]) for s, a in zip(shapes, axes, strict=True)]
    x = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in mapped]

    def run(q: Any, k: Any, v: Any) -> Any:
        return block_sparse.whole(q, k, v, tiles)

    got = jax.vmap(run, in_axes=axes)(*x)
    q, k, given = launches[-1]  # the first is a trace for the rule, of which nothing is left
    assert (q[0], k[0], given) == (6, 6, tiles)
    assert (given.lists, given.test, given.arrays) == (None, None, ())
    for i in range(3):
        want = run(
            *(y if a is None else jnp.take(y, i, axis=a) for y, a in zip(x, axes, strict=True))
        )
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(one[i], other, rtol=1e-5, atol=1e-6)
    twice = jax.vmap(jax.vmap(run))(*(jnp.ones((2, 3, *s)) for s in shapes))
    assert launches[-1][0][0] == 12 and twice[0].shape == (2, 3, *shapes[0])
