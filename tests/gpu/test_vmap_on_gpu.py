"""`vmap` over calls of the GPU libraries: some operands mapped and others not, and lengths."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from tests.gpu.requirements import skip_unless_available
from tests.reference import attention64, error

pytestmark = pytest.mark.gpu

B, T, S, N, K, H, MANY = 2, 256, 384, 4, 2, 64, 3
AXES = {
    "all": (0, 0, 0, 0),
    "lengths": (None, None, None, 0),
    "queries": (0, None, None, None),
    "keys": (None, 0, None, 0),
    "values": (None, None, 0, None),
    "inner axes": (1, 2, 0, 0),
}
KERNELS = ("flash", "cudnn", "cudnn_flash_te")


def _drawn(axes: tuple[int | None, ...], many: tuple[int, ...]) -> list[jax.Array]:
    rng = np.random.default_rng(3)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H)
    sizes = [
        s if a is None else (*s[:a], *many, *s[a:]) for s, a in zip(shapes, axes[:3], strict=True)
    ]
    q, k, v = (jnp.asarray(rng.normal(size=size), jnp.bfloat16) for size in sizes)
    ends = jnp.asarray(rng.integers(2, S + 1, (B,) if axes[3] is None else (*many, B)), jnp.int32)
    return [q, k, v, ends, jnp.asarray(rng.normal(size=(*many, B, T, N, H)), jnp.bfloat16)]


def _attend(kernel: str, lengths: bool) -> Any:
    config = ma.AttentionConfig(attention=kernel)

    def attend(q: Any, k: Any, v: Any, ends: Any) -> Any:
        mask = M.KeyPadding(ends) if lengths else None
        return ma.attention(q, k, v, mask=mask, config=config)

    return attend


def _step(attend: Any) -> Any:
    def step(q: Any, k: Any, v: Any, ends: Any, dout: Any) -> Any:
        out, pull = jax.vjp(lambda *x: attend(*x, ends), q, k, v)
        return out, *pull(dout)

    return step


def _hold(got: Any, x: list[Any], lengths: bool) -> None:
    q, k, v, ends, dout = (np.asarray(y, np.float64) for y in x)
    pairs = np.arange(S) < (ends[:, None, None, None] if lengths else S + 0 * ends[0])
    pairs = np.broadcast_to(pairs, (B, 1, T, S))
    out, _, *grads = attention64(q, k, v, pairs, scale=H**-0.5, dout=dout, dlse=np.zeros((B, N, T)))
    assert max(error(g, w) for g, w in zip(got, (out, *grads), strict=False)) < 2e-2


@pytest.mark.parametrize("lengths", [True, False])
@pytest.mark.parametrize("name", AXES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_vmap_of_gradients(kernel: str, name: str, lengths: bool) -> None:
    skip_unless_available(kernel)
    axes = (*AXES[name], 0)
    x = _drawn(axes, (MANY,))
    got = jax.jit(jax.vmap(_step(_attend(kernel, lengths)), in_axes=axes))(*x)
    for i in range(MANY):
        one = [y if a is None else jnp.take(y, i, a) for y, a in zip(x, axes, strict=True)]
        _hold([g[i] for g in got], one, lengths)


@pytest.mark.parametrize("kernel", KERNELS)
def test_nested_vmaps(kernel: str) -> None:
    skip_unless_available(kernel)
    axes = (0, None, 0, 0, 0)
    x = _drawn(axes, (MANY, 2))
    step = _step(_attend(kernel, True))
    got = jax.jit(jax.vmap(jax.vmap(step, axes), axes))(*x)
    for at in np.ndindex(MANY, 2):
        one = [y if a is None else y[at] for y, a in zip(x, axes, strict=True)]
        _hold([g[at] for g in got], one, True)


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_of_a_vmap(kernel: str) -> None:
    """The gradient of shared keys is the sum over the examples."""
    skip_unless_available(kernel)
    q, k, v, ends, dout = _drawn((0, None, None, 0), (MANY,))
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
    x = _drawn((0, 0, 0, 0), (MANY,))
    run, spec = jax.vmap(_step(_attend(kernel, True))), jax.sharding.PartitionSpec("data")
    sharded = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    got = jax.jit(sharded)(*x)
    for i in range(MANY):
        _hold([g[i] for g in got], [y[i] for y in x], True)


@pytest.mark.parametrize("kernel", KERNELS)
def test_vmap_over_segments(kernel: str) -> None:
    """Segment ids that are mapped: `flash` tests pairs, the others refuse by name."""
    skip_unless_available(kernel)
    if kernel != "flash":
        pytest.skip(f"{kernel} refuses segments")
    q, k, v, _, dout = _drawn((0, None, None, 0), (MANY,))
    rng = np.random.default_rng(9)
    ids = [jnp.asarray(rng.integers(0, 3, (MANY, B, n)), jnp.int32) for n in (T, S)]
    config = ma.AttentionConfig(attention=kernel)

    def step(q: Any, q_ids: Any, kv_ids: Any, dout: Any) -> Any:
        mask = M.Segments(q_ids, kv_ids)
        out, pull = jax.vjp(lambda *x: ma.attention(*x, mask=mask, config=config), q, k, v)
        return out, *pull(dout)

    got = jax.jit(jax.vmap(step))(q, *ids, dout)
    for i in range(MANY):
        pairs = np.asarray(ids[0][i])[:, None, :, None] == np.asarray(ids[1][i])[:, None, None, :]
        x = (np.asarray(y, np.float64) for y in (q[i], k, v))
        dlse = np.zeros((B, N, T))
        want = attention64(*x, pairs, scale=H**-0.5, dout=np.asarray(dout[i], "f"), dlse=dlse)
        wanted = (want[0], *want[2:])
        assert max(error(g[i], w) for g, w in zip(got, wanted, strict=False)) < 2e-2
