"""`check_finite: true` names the operand that is not finite."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src import dispatch

import maxattn as ma
from maxattn import masks as M
from maxattn.errors import InputError

CHECKED = ma.AttentionConfig(attention="dot_product", check_finite=True)
LENGTHS = M.KeyPadding(np.array([3, 5], np.int32))  # of 6 keys


def operands(**bad: tuple[tuple[Any, ...], float]) -> dict[str, Any]:
    """Draw q, k and v; `k=((0, 5, 0, 0), nan)` puts a number into one of them."""
    rng = np.random.default_rng(0)
    drawn = {name: rng.normal(size=(2, 6, 2, 4)).astype("f") for name in "qkv"}
    for name, (index, value) in bad.items():
        drawn[name][index] = value
    return {name: jnp.asarray(x) for name, x in drawn.items()}


def refusal(compute: Any, *args: Any) -> str:
    with pytest.raises((InputError, jax.errors.JaxRuntimeError)) as error:
        jax.block_until_ready(compute(*args))
        jax.effects_barrier()
    dispatch.runtime_tokens.clear()  # jax keeps the failed ones, and fails on them again at exit
    return str(error.value)


def attend(x: dict[str, Any], bias: Any = None, config: ma.AttentionConfig = CHECKED) -> jax.Array:
    return ma.attention(**x, mask=LENGTHS, bias=bias, config=config)


@pytest.mark.parametrize(
    ("name", "index", "value", "words"),
    [
        ("k", (0, 5, 1, 2), np.nan, "1 times, first at [0, 5, 1, 2], a key that the mask hides"),
        ("v", (0, 3, 0, 0), np.inf, "1 times, first at [0, 3, 0, 0], a key that the mask hides"),
        ("v", (1, 3, 0, 0), -np.inf, "1 times, first at [1, 3, 0, 0]\n"),
        ("q", (1, 5, 0, 3), np.nan, "1 times, first at [1, 5, 0, 3]\n"),
        ("k", (1, slice(2, 4)), np.nan, "16 times, first at [1, 2, 0, 0]\n"),
    ],
)
def test_the_operand_and_the_place_are_named(
    name: str, index: tuple[Any, ...], value: float, words: str
) -> None:
    x = operands(**{name: (index, value)})
    for compute in (attend, jax.jit(attend), jax.grad(lambda x: attend(x).sum())):
        text = refusal(compute, x)
        assert f"{name}: NaN or infinity {words}" in text and "check_finite: true" in text


def test_a_bias_may_be_minus_infinity_alone() -> None:
    bias = jnp.zeros((1, 1, 6, 6)).at[0, 0, 1, 1].set(-jnp.inf)
    np.testing.assert_array_equal(
        attend(operands(), bias), attend(operands(), bias, ma.AttentionConfig())
    )
    for value in (jnp.inf, jnp.nan):
        text = refusal(attend, operands(), bias.at[0, 0, 2, 4].set(value))
        assert "bias: NaN or infinity 1 times, first at [0, 0, 2, 4]\n" in text


def test_vmap_and_scan_are_checked() -> None:
    good, bad = operands(), operands(k=((0, 5, 0, 0), np.nan))
    x = jax.tree.map(lambda *leaves: jnp.stack(leaves), good, bad)
    assert "a key that the mask hides" in refusal(jax.jit(jax.vmap(attend)), x)
    scanned = jax.jit(lambda x: jax.lax.map(jax.checkpoint(attend), x))
    assert "a key that the mask hides" in refusal(scanned, x)


def test_a_mesh_is_checked_as_a_whole() -> None:
    config = CHECKED.replace(ici_context_parallelism=2, context_parallel="ring")
    mesh = config.make_mesh(jax.devices()[:2])
    x = operands(v=((0, 5, 1, 3), np.nan))
    compute = jax.jit(lambda x: ma.attention(**x, mask=LENGTHS, config=config, mesh=mesh))
    assert "v: NaN or infinity 1 times, first at [0, 5, 1, 3], a key" in refusal(compute, x)


def test_a_frame_below_0_is_named_under_jit() -> None:
    attn = ma.FlaxAttention(12, heads=2, dim_head=6, config=CHECKED, rngs=nnx.Rngs(0))
    x = jnp.ones((1, 2, 12))
    run = jax.jit(lambda first: attn(x, rotary_emb=ma.rope_3d(6, first + jnp.arange(2), 1, 1)))
    text = refusal(run, -1)
    assert "rotary_emb cos: NaN or infinity 1 times" in text and "a frame below 0" in text


@pytest.mark.parametrize("is_tiled", [False, True])
def test_gradients_are_finite_beside_hidden_numbers_whose_products_overflow(is_tiled: bool) -> None:
    x = operands(v=((0, slice(3, 6)), 3e38))
    config = CHECKED.replace(use_memory_efficient_attention=is_tiled, attention="dot_product")
    grads = jax.grad(lambda x: 2 * attend(x, config=config).sum())(x)
    assert all(np.isfinite(each).all() for each in grads.values())


def test_what_is_finite_computes_the_same() -> None:
    x, plain = operands(), CHECKED.replace(check_finite=False)
    np.testing.assert_array_equal(attend(x), attend(x, config=plain))
    np.testing.assert_array_equal(jax.jit(attend)(x), attend(x))


def test_under_jit_the_error_is_logged_first(caplog: pytest.LogCaptureFixture) -> None:
    refusal(jax.jit(attend), operands(v=((0, 0, 0, 0), np.nan)))
    first = caplog.records[0]
    assert first.name == "maxattn" and first.getMessage().startswith("v: NaN or infinity 1 times")
