"""`vmap` over calls of the GPU libraries, with some operands mapped, and with lengths."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import maxattn as ma
from maxattn import masks as M
from tests.cases import allowed
from tests.gpu.requirements import skip_unless_available
from tests.kernels.mapped import Mapped, one_of, step
from tests.reference import error

pytestmark = pytest.mark.gpu

B, T, S, MANY = 2, 256, 384, 3
SIZES = Mapped(B, T, S, 4, 2, 64, 64**-0.5, "bfloat16", 2e-2)
AXES = {
    "all": (0, 0, 0, 0),
    "lengths": (None, None, None, 0),
    "queries": (0, None, None, None),
    "keys": (None, 0, None, 0),
    "values": (None, None, 0, None),
    "inner axes": (1, 2, 0, 0),
    "all but keys": (0, None, 0, 0),
}
KERNELS = ("flash", "cudnn", "cudnn_flash_te")


def _attend(kernel: str, lengths: bool) -> Any:
    config = ma.AttentionConfig(attention=kernel)

    def attend(q: Any, k: Any, v: Any, ends: Any) -> Any:
        mask = M.KeyPadding(ends) if lengths else None
        return ma.attention(q, k, v, mask=mask, config=config)

    return attend


WAYS = {
    "one": lambda run, axes: jax.vmap(run, axes),
    "nested": lambda run, axes: jax.vmap(jax.vmap(run, axes), axes),
    "in a user's shard_map": lambda run, axes: jax.shard_map(
        jax.vmap(run, axes), mesh=Mesh(jax.devices()[:1], ("data",)), check_vma=False,
        in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"),
    ),
}  # fmt: skip
CASES = [
    *product(AXES, [True, False], ["one"]),
    ("all but keys", True, "nested"),
    ("all", True, "in a user's shard_map"),
]


@pytest.mark.parametrize(("name", "lengths", "way"), CASES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_vmap_of_gradients(kernel: str, name: str, lengths: bool, way: str) -> None:
    skip_unless_available(kernel)
    axes, many = (*AXES[name], 0), (MANY, 2) if way == "nested" else (MANY,)
    x = SIZES.drawn(axes, many)
    got = jax.jit(WAYS[way](step(_attend(kernel, lengths)), axes))(*x)
    for at in np.ndindex(*many):
        one = one_of(x, axes, *at)
        SIZES.judge([g[at] for g in got], one, SIZES.real(one[3]) if lengths else True)


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_of_a_vmap(kernel: str) -> None:
    """The gradient of shared keys is the sum over the examples."""
    skip_unless_available(kernel)
    q, k, v, ends, dout = SIZES.drawn((0, None, None, 0), (MANY,))
    attend = _attend(kernel, True)

    def mapped(k: Any, v: Any) -> Any:
        out = jax.vmap(lambda q, ends: attend(q, k, v, ends))(q, ends)
        return (out.astype(jnp.float32) * dout).sum()

    def looped(k: Any, v: Any) -> Any:
        outs = (attend(q[i], k, v, ends[i]).astype(jnp.float32) * dout[i] for i in range(MANY))
        return sum(out.sum() for out in outs)

    got, want = (jax.jit(jax.grad(f, (0, 1)))(k, v) for f in (mapped, looped))
    assert max(error(g, w) for g, w in zip(got, want, strict=True)) < 2e-2


@pytest.mark.parametrize("causal", [False, True])
def test_vmap_over_segments(causal: bool) -> None:
    """Segment ids that are mapped: `flash` tests pairs, the others refuse by name."""
    skip_unless_available("flash")
    q, k, v, _, dout = SIZES.drawn((0, None, None, 0), (MANY,))
    rng, config = np.random.default_rng(9), ma.AttentionConfig(attention="flash")
    ids = [jnp.asarray(rng.integers(0, 3, (MANY, B, n)), jnp.int32) for n in (T, S)]
    before = M.Causal() if causal else M.Full()

    def both(q: Any, q_ids: Any, kv_ids: Any, dout: Any) -> Any:
        mask = before & M.Segments(q_ids, kv_ids)
        attend = partial(ma.attention, mask=mask, config=config)
        return step(lambda q, k, v, _: attend(q, k, v))(q, k, v, None, dout)

    got = jax.jit(jax.vmap(both))(q, *ids, dout)
    for i in range(MANY):
        pairs = allowed(before & M.Segments(ids[0][i], ids[1][i]), T, S)
        SIZES.judge([g[i] for g in got], [q[i], k, v, None, dout[i]], pairs)
