"""`vmap` over calls of the GPU libraries, with some operands mapped, and with lengths."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
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
}
KERNELS = ("flash", "cudnn", "cudnn_flash_te")


def _attend(kernel: str, lengths: bool) -> Any:
    config = ma.AttentionConfig(attention=kernel)

    def attend(q: Any, k: Any, v: Any, ends: Any) -> Any:
        mask = M.KeyPadding(ends) if lengths else None
        return ma.attention(q, k, v, mask=mask, config=config)

    return attend


def _judge(got: Any, x: list[Any], lengths: bool = True) -> None:
    SIZES.judge(got, x, SIZES.real(x[3]) if lengths else True)


@pytest.mark.parametrize("lengths", [True, False])
@pytest.mark.parametrize("name", AXES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_vmap_of_gradients(kernel: str, name: str, lengths: bool) -> None:
    skip_unless_available(kernel)
    axes = (*AXES[name], 0)
    x = SIZES.drawn(axes, (MANY,))
    got = jax.jit(jax.vmap(step(_attend(kernel, lengths)), in_axes=axes))(*x)
    for i in range(MANY):
        _judge([g[i] for g in got], one_of(x, axes, i), lengths)


@pytest.mark.parametrize("kernel", KERNELS)
def test_nested_vmaps(kernel: str) -> None:
    skip_unless_available(kernel)
    axes = (0, None, 0, 0, 0)
    x = SIZES.drawn(axes, (MANY, 2))
    got = jax.jit(jax.vmap(jax.vmap(step(_attend(kernel, True)), axes), axes))(*x)
    for at in np.ndindex(MANY, 2):
        _judge([g[at] for g in got], one_of(x, axes, *at))


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


@pytest.mark.parametrize("kernel", KERNELS)
def test_vmap_in_a_users_shard_map(kernel: str) -> None:
    skip_unless_available(kernel)
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    x = SIZES.drawn((0,) * 4, (MANY,))
    run, spec = jax.vmap(step(_attend(kernel, True))), jax.sharding.PartitionSpec("data")
    sharded = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    got = jax.jit(sharded)(*x)
    for i in range(MANY):
        _judge([g[i] for g in got], [y[i] for y in x])


@pytest.mark.parametrize("kernel", KERNELS)
def test_vmap_over_segments(kernel: str) -> None:
    """With mapped segment ids `flash` tests pairs, and the others raise."""
    skip_unless_available(kernel)
    if kernel != "flash":
        pytest.skip(f"{kernel} refuses segments")
    q, k, v, _, dout = SIZES.drawn((0, None, None, 0), (MANY,))
    rng = np.random.default_rng(9)
    ids = [jnp.asarray(rng.integers(0, 3, (MANY, B, n)), jnp.int32) for n in (T, S)]
    config = ma.AttentionConfig(attention=kernel)

    def both(q: Any, q_ids: Any, kv_ids: Any, dout: Any) -> Any:
        attend = partial(ma.attention, mask=M.Segments(q_ids, kv_ids), config=config)
        return step(lambda q, k, v, _: attend(q, k, v))(q, k, v, None, dout)

    got = jax.jit(jax.vmap(both))(q, *ids, dout)
    for i in range(MANY):
        pairs = np.asarray(ids[0][i])[:, None, :, None] == np.asarray(ids[1][i])[:, None, None, :]
        SIZES.judge([g[i] for g in got], [q[i], k, v, None, dout[i]], pairs)
