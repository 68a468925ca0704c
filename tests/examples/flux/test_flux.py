"""Flux's double block with diffusers' weights: diffusers' numbers, on one device and over
context.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common.residual import residual
from flax import nnx
from flux.block import FluxBlock, positions

import maxattn as ma
from maxattn import weights
from maxattn.errors import InputError
from tests.examples.parity import compare, fixture, part
from tests.fixtures import make_diffusers as made
from tests.waiting import but
from tests.weights.test_diffusers import live

DENSE = ma.AttentionConfig(attention="dot_product")


def compare_block(theirs: Any, config: Any, mesh: Any = None, add: bool = True) -> None:
    """Compare text and picture with theirs; with `add` False the last branches are added here."""
    block = nnx.eval_shape(lambda: FluxBlock(32, made.FLUX_HEADS, config, mesh, rngs=nnx.Rngs(0)))
    weights.load_diffusers(block, part(theirs, "weights."), mesh=mesh)
    rotary = positions(made.FLUX_TEXT, made.HEIGHT, made.ROWS, made.FLUX_AXES)

    def call(block: FluxBlock, x: jax.Array, given: Any) -> jax.Array:
        picture, text = block(x, given["text"], given["temb"], rotary, add)
        return jnp.concatenate([residual(text).total, residual(picture).total], axis=1)

    compare(block, theirs, call, channels=False)


# 17 tokens in all: no number of devices divides them. test_models.py has the block as it is.
CASES = [("no mesh, branches left open", 1, "ring"), ("ring of four", 4, "ring")]
CASES += [("ring of two", 2, "ring"), ("gathered", 4, "all_gather")]


@pytest.mark.parametrize(("name", "context", "strategy"), but(CASES, CASES[:1]))
def test_the_block_is_diffusers(name: str, context: int, strategy: Any) -> None:
    how = {"context_parallel": strategy, "ici_context_parallelism": context}
    config = DENSE.replace(ici_data_parallelism=1, **how)
    mesh = config.make_mesh(jax.devices()[:context]) if context > 1 else None
    compare_block(fixture("flux_block"), config, mesh, add=mesh is not None)


def test_live() -> None:
    compare_block(live("flux_block"), DENSE)


def test_a_mask_hides_tokens_of_the_text_from_both() -> None:
    block = ma.JointAttention(16, 12, heads=2, dim_head=8, config=DENSE, rngs=nnx.Rngs(0))
    x, text = (jax.random.normal(jax.random.key(n), (2, n, c)) for n, c in ((6, 16), (4, 12)))
    seen = jnp.arange(10)[None] != 3
    mask = ma.masks.KeyPadding(jnp.broadcast_to(seen, (2, 10)))
    moved = text.at[:, 3].add(1.0)
    for a, b in zip(block(x, text, mask=mask), block(x, moved, mask=mask), strict=True):
        np.testing.assert_allclose(a[:, :3], b[:, :3], atol=1e-6)
    assert not np.allclose(block(x, text)[0], block(x, moved)[0], atol=1e-3)


def test_what_does_not_fit_is_refused() -> None:
    block = ma.JointAttention(16, 12, heads=2, dim_head=8, config=DENSE, rngs=nnx.Rngs(0))
    x, text = jnp.ones((2, 6, 16)), jnp.ones((2, 4, 12))
    for arguments, word in (
        ((x, jnp.ones((2, 4, 16))), "added_kv_proj_dim=12"),
        ((x, jnp.ones((1, 4, 12))), "batch"),
        ((x, text, ma.rope_1d(8, 6)), "for 10 tokens"),
    ):
        with pytest.raises(InputError, match=word):
            nnx.eval_shape(lambda m, a=arguments: m(*a), block)
    with pytest.raises(InputError, match="added_kv_proj_dim"):
        ma.JointAttention(16, 0, heads=2, dim_head=8, rngs=nnx.Rngs(0))
