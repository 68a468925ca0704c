"""What surrounds the splash attentions: 64-bit mode, no promotion, a user's `shard_map`, two runs
of the same.
"""

from __future__ import annotations

import importlib.util
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import maxattn as ma
from maxattn import masks as M
from maxattn.errors import MeshError, Unsupported
from maxattn.kernels import KERNELS
from tests.golden_text import check_golden
from tests.reference import error
from tests.waiting import but

FAST = {"xla_backend_optimization_level": 0}
needs_tokamax = pytest.mark.skipif(
    importlib.util.find_spec("tokamax") is None, reason="tokamax is not installed"
)
NAMES = ["flash", "flash fused", pytest.param("tokamax_flash", marks=needs_tokamax)]
SETTINGS: dict[str, dict[str, Any]] = {
    "flash": {"attention": "flash"},
    "flash fused": {"attention": "flash", "flash_block_sizes": {"use_fused_bwd_kernel": True}},
    "tokamax_flash": {"attention": "tokamax_flash", "use_base2_exp": True},
}
CONFIGS = {name: ma.AttentionConfig(**settings) for name, settings in SETTINGS.items()}
MASK = M.BlockSlidingWindow(24, 3) & M.KeyPadding(np.array([150, 90], np.int64))


def qkv(dtype: str = "float32") -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(2), 3)
    return tuple(
        jax.random.normal(key, (2, 150, n, 32), dtype)
        for key, n in zip(keys, (4, 2, 2), strict=True)
    )


def gradients(
    config: ma.AttentionConfig, q: Any, k: Any, v: Any, **more: Any
) -> tuple[jax.Array, ...]:
    return program(config, **more)(q, k, v)


def program(config: ma.AttentionConfig, **more: Any) -> Any:
    """Compile a forward and its backward once for all calls."""
    attend = partial(ma.attention, mask=MASK, config=config, return_lse=True, **more)

    @partial(jax.jit, compiler_options=FAST)
    def both(q, k, v):
        (out, lse), vjp = jax.vjp(attend, q, k, v)
        return out, lse, *vjp((out, jnp.ones_like(lse)))

    return both


@cache
def dense(causal: bool = False) -> tuple[jax.Array, ...]:
    """Compute what every kernel here must: by the dense one, once."""
    if causal:

        @jax.jit
        def gradient(q, k, v):
            loss = lambda *x: (ma.attention(*x, mask=M.Causal()) ** 2).sum()  # noqa: E731
            return jax.grad(loss)(q, k, v)

        return (gradient(*qkv()),)
    return gradients(ma.AttentionConfig(attention="dot_product"), *qkv())


# The fused backward is splash's own: where maxattn's code is asked, it meets `make test-all`.
# The code around flash is around both others.
APART = [
    "flash",
    pytest.param("flash fused", marks=pytest.mark.slow),
    pytest.param("tokamax_flash", marks=[needs_tokamax, pytest.mark.slow]),
]


@pytest.mark.parametrize("name", APART)
def test_64_bit_mode_changes_nothing(name: str) -> None:
    want = gradients(CONFIGS[name], *qkv())
    with jax.enable_x64(True):
        got = gradients(CONFIGS[name], *qkv())
    assert all(error(g, w) < 1e-5 for g, w in zip(got, want, strict=True))
    assert all(g.dtype == jnp.float32 for g in got)


@pytest.mark.parametrize("name", APART)
def test_where_promotion_is_forbidden(name: str) -> None:
    mesh = ma.AttentionConfig(ici_data_parallelism=2, ici_context_parallelism=2).make_mesh(
        jax.devices()[:4]
    )
    config = ma.AttentionConfig(**SETTINGS[name], context_parallel="ring")
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        got = gradients(config, *qkv(), mesh=mesh)
    assert all(error(g, w) < 2e-5 for g, w in zip(got, dense(), strict=True))


@pytest.mark.parametrize("name", APART)
def test_the_backward_repeats_bit_for_bit(name: str) -> None:
    run = program(CONFIGS[name])
    first, again = (run(*qkv("bfloat16")) for _ in range(2))
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(first, again, strict=True))
    x = jax.ShapeDtypeStruct((1, 64, 2, 32), "float32")
    config = ma.AttentionConfig(attention=CONFIGS[name].attention, deterministic=True)
    assert (
        ma.plan(ma.Call.of(x, x), config, target=ma.Target.here()).kernel.name == config.attention
    )


def test_every_kernel_says_whether_it_repeats() -> None:
    assert all(hasattr(kernel, "repeats") for kernel in KERNELS.values())


def test_deterministic_refuses_a_kernel_that_does_not_repeat() -> None:
    x = jax.ShapeDtypeStruct((1, 4096, 2, 64), "bfloat16")
    target = ma.Target.named("NVIDIA H200", (("transformer-engine-jax", "2.20.2"),))
    named = {"attention": "cudnn_flash_te", "deterministic": True}
    with pytest.raises(Unsupported) as caught:
        ma.plan(ma.Call.of(x, x), ma.AttentionConfig(**named), target=target)
    check_golden("refused/not_deterministic", f"{type(caught.value).__name__}\n{caught.value}")
    chosen = ma.plan(ma.Call.of(x, x), ma.AttentionConfig(**named, fallback="warn"), target=target)
    assert KERNELS[chosen.kernel.name].repeats(chosen.call, target) is None


@pytest.mark.parametrize("checked", but([True, False], [True]))
@pytest.mark.parametrize("name", APART)
def test_inside_a_users_shard_map(name: str, checked: bool) -> None:
    """Over some of the axes it works, checked or not; over all of them, checked, the message is
    ours.
    """
    mesh = ma.AttentionConfig(ici_data_parallelism=2).make_mesh(jax.devices()[:2])
    q, k, v = qkv()
    attend = partial(ma.attention, mask=M.Causal(), config=CONFIGS[name], mesh=mesh)
    some = {"data", "context"}
    spec = PartitionSpec("data")
    mapped = partial(
        jax.shard_map, attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=checked
    )
    loss = partial(jax.jit, compiler_options=FAST)(
        jax.grad(lambda *x: (mapped(axis_names=some)(*x) ** 2).sum())
    )
    assert error(loss(q, k, v), dense(causal=True)[0]) < 2e-5
    if checked:
        with pytest.raises(MeshError) as caught:
            mapped(axis_names=set(mesh.axis_names))(q, k, v)
        check_golden(
            "inputs/checked_shard_map", str(caught.value).replace(CONFIGS[name].attention, "KERNEL")
        )
