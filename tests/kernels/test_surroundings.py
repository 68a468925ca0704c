"""Kernels in 64-bit mode, without promotion, in a user's `shard_map`, and under empty vmaps.

Also two runs of the same call, and offsets that splash's codes cannot represent.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import maxattn as ma
from maxattn import masks as M
from maxattn.errors import InputError, MeshError, Unsupported
from maxattn.kernels import KERNELS
from maxattn.kernels.base import Inputs
from maxattn.kernels.flash import Flash
from maxattn.kernels.splash.kernel import Splash
from maxattn.kernels.tokamax_flash import TokamaxFlash
from tests.cases import compare
from tests.golden_text import check_golden
from tests.kernels.test_flash import FUSED, SHARD, UNFUSED, VIDEO
from tests.reference import attention64, error

needs_tokamax = pytest.mark.skipif(
    importlib.util.find_spec("tokamax") is None, reason="tokamax is not installed"
)
SETTINGS: dict[str, dict[str, Any]] = {
    "flash": {"attention": "flash"},
    "flash fused": {"attention": "flash", "flash_block_sizes": {"use_fused_bwd_kernel": True}},
    "tokamax_flash": {"attention": "tokamax_flash", "use_base2_exp": True},
    "dense": {"attention": "dot_product"},
    "blockwise": {
        "attention": "dot_product", "use_memory_efficient_attention": True,
        "query_chunk_size": 48, "key_chunk_size": 40,
    },
}  # fmt: skip
CONFIGS = {name: ma.AttentionConfig(**settings) for name, settings in SETTINGS.items()}
MASK = M.BlockSlidingWindow(24, 3) & M.KeyPadding(np.array([150, 90], np.int64))


def qkv(dtype: str = "float32") -> tuple[jax.Array, ...]:
    keys, heads = jax.random.split(jax.random.key(2), 3), (4, 2, 2)
    shapes = [(2, 150, n, 32) for n in heads]
    return tuple(jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True))


def program(config: ma.AttentionConfig, **more: Any) -> Any:
    """Compile a forward and its backward once for all calls."""
    attend = partial(ma.attention, mask=MASK, config=config, return_lse=True, **more)

    @jax.jit
    def both(q, k, v):
        (out, lse), vjp = jax.vjp(attend, q, k, v)
        return out, lse, *vjp((out, jnp.ones_like(lse)))

    return both


# The fused backward is splash's own: where maxattn's code is asked, it meets `make test-all`.
# The code around flash is around both others.
APART = [
    "flash",
    pytest.param("flash fused", marks=pytest.mark.slow),
    pytest.param("tokamax_flash", marks=[needs_tokamax, pytest.mark.slow]),
]
EACH = [*APART, "dense", pytest.param("blockwise", marks=pytest.mark.slow)]


@pytest.mark.parametrize("name", EACH)
def test_it_repeats_bit_for_bit_and_64_bit_mode_changes_nothing(name: str) -> None:
    want, again = map(program(CONFIGS[name]), *zip(*[qkv()] * 2, strict=True))
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(want, again, strict=True))
    with jax.enable_x64(True):
        got = program(CONFIGS[name])(*qkv())
    assert all(error(g, w) < 1e-5 for g, w in zip(got, want, strict=True))
    assert all(g.dtype == jnp.float32 for g in got)
    x = jax.ShapeDtypeStruct((1, 64, 2, 32), "float32")
    configs = (CONFIGS[name].replace(deterministic=asked) for asked in (True, False))
    assert len({ma.plan(ma.Call.of(x, x), config).kernel for config in configs}) == 1


@pytest.mark.parametrize("name", EACH)
def test_where_promotion_is_forbidden(name: str) -> None:
    sizes = ma.AttentionConfig(ici_data_parallelism=2, ici_context_parallelism=2)
    mesh = sizes.make_mesh(jax.devices()[:4])
    config = ma.AttentionConfig(**SETTINGS[name], context_parallel="ring")
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        out, lse, *grads = jax.eval_shape(program(config, mesh=mesh), *qkv())
    assert [x.shape for x in (out, *grads)] == [x.shape for x in (qkv()[0], *qkv())]
    assert lse.shape == (2, 4, 150)


def test_deterministic_refuses_a_kernel_that_does_not_repeat() -> None:
    x = jax.ShapeDtypeStruct((1, 4096, 2, 64), "bfloat16")
    target = ma.Target.named("NVIDIA H200", (("transformer-engine-jax", "2.20.2"),))
    named = {"attention": "cudnn_flash_te", "deterministic": True}
    with pytest.raises(Unsupported) as caught:
        ma.plan(ma.Call.of(x, x), ma.AttentionConfig(**named), target=target)
    check_golden("refused/not_deterministic", f"{type(caught.value).__name__}\n{caught.value}")
    chosen = ma.plan(ma.Call.of(x, x), ma.AttentionConfig(**named, fallback="warn"), target=target)
    assert KERNELS[chosen.kernel.name].repeats(chosen.call, target) is None


@pytest.mark.parametrize("name", APART)
def test_a_checked_shard_map_over_all_axes_is_refused(name: str) -> None:
    mesh = ma.AttentionConfig(ici_data_parallelism=2).make_mesh(jax.devices()[:2])
    attend, spec = partial(ma.attention, config=CONFIGS[name], mesh=mesh), PartitionSpec("data")
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    with pytest.raises(MeshError) as caught:
        mapped(*qkv())
    text = str(caught.value).replace(CONFIGS[name].attention, "KERNEL")
    check_golden("inputs/checked_shard_map", text)


@pytest.mark.parametrize("level", [-200.0, 200.0])
def test_a_large_bias_does_not_overflow_in_rows_that_fill_the_last_chunk(level: float) -> None:
    bias, dout = jnp.full((1, 1, 1, 150), level), np.ones((2, 150, 4, 32))
    attend = partial(ma.attention, bias=bias, config=CONFIGS["blockwise"])
    want = attention64(*qkv(), bias=bias, dout=dout)
    got = jax.jit(jax.grad(lambda *x: attend(*x).sum(), (0, 1, 2)))(*qkv())
    compare((None, None, *got), want, 1e-3)  # float32 keeps 1e-5 of a score at 200


@pytest.mark.parametrize(("kernel", "axes"), [("flash", (1, None)), ("tokamax_flash", (None, 0))])
def test_vmap_over_no_example_is_refused(kernel: str, axes: tuple[int | None, ...]) -> None:
    """Under jit too, and where something is differentiated; plain JAX gives an empty result."""

    def run(attention: str, differentiate: bool):
        config = ma.AttentionConfig(attention=attention)

        def call(q, k):
            out = ma.attention(q, k, k, mask=M.Causal(), config=config)
            return out.astype(jnp.float32).sum() if differentiate else out

        one = jax.grad(call, (0, 1)) if differentiate else call
        x, nothing = jnp.ones((1, 16, 2, 16)), jnp.array([], int)
        none = [x if a is None else jnp.stack([x] * 2, a).take(nothing, a) for a in axes]
        return jax.vmap(jax.jit(one), in_axes=axes)(*none)

    for differentiate in (False, True):
        with pytest.raises(InputError, match=f"(?s)size 0.*{kernel} needs at least one example"):
            run(kernel, differentiate)
        assert all(x.shape[0] == 0 for x in jax.tree.leaves(run("dot_product", differentiate)))


# ---- splash's kernels ----------------------------------------------------------------------------

SPLASH = [Flash(0.125, UNFUSED), TokamaxFlash(0.125, FUSED)]


@needs_tokamax
@pytest.mark.parametrize("kernel", SPLASH, ids=lambda kernel: kernel.name)
def test_an_offset_that_no_code_holds_gives_nan_and_no_wrong_number(kernel: Splash) -> None:
    kernel, x = replace(kernel, interpret=True), jnp.ones((1, SHARD, 1, 64))
    forward = jax.jit(lambda offset: kernel.forward(Inputs(x, x, x, None, VIDEO, 0, offset)).out)
    assert np.isfinite(np.asarray(forward(SHARD))).all()
    assert np.isnan(np.asarray(forward(SHARD - 1))).all()


@needs_tokamax
@pytest.mark.parametrize(("kernel", "products"), list(zip(SPLASH, (2, 4), strict=True)))
def test_float32_products_stay_whole_on_a_tpu(kernel: Splash, products: int) -> None:
    """tokamax's kernel has two bodies, for tiles that evaluate the mask and for those that do not.

    Half of the matmuls multiply queries by K, the others weights by V.
    """
    for dtype, share in (("float32", 2), ("bfloat16", 0)):
        x = jnp.ones((1, 128, 1, 64), dtype)
        text = str(jax.make_jaxpr(lambda x: kernel.forward(Inputs(x, x, x)))(x))
        highest = text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)")
        assert text.count("dot_general[") == products and highest == share * products // 2
