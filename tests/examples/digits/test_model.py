"""The transformer: shapes, and the inputs that its output depends on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from maxattn_examples.digits import text
from maxattn_examples.digits.flow import loss_of
from maxattn_examples.digits.model import WanTransformer, patchify, unpatchify
from maxattn_examples.digits.settings import Settings

BATCH = 8


def built(settings: Settings) -> WanTransformer:
    """Build a model whose head is not zero: a new one gives zeros."""
    model = WanTransformer(settings, rngs=nnx.Rngs(0))
    kernel = model.head.proj_out.kernel
    kernel[...] = jax.random.normal(jax.random.key(1), kernel[...].shape) / 4
    return model


def inputs(settings: Settings) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draw noisy videos, times and prompts, one of them short and one empty."""
    video = jax.random.normal(jax.random.key(2), (BATCH, *settings.video_shape))
    prompts = ["a seven moving left", "three", "", "an eight moving up"] * (BATCH // 4)
    return video, jnp.linspace(0.1, 1.0, BATCH), jnp.asarray(text.encode(prompts))


@nnx.jit
def run(model: WanTransformer, video: jax.Array, t: jax.Array, words: jax.Array) -> jax.Array:
    return model(video, t, words)


def test_the_size_of_the_default_model():
    shapes = nnx.eval_shape(lambda: WanTransformer(Settings(), rngs=nnx.Rngs(0)))
    assert sum(x.size for x in jax.tree.leaves(nnx.state(shapes, nnx.Param))) == 700_356


def test_output_depends_on_time_and_prompt_and_each_video_alone(small: Settings):
    model, (video, t, words) = built(small), inputs(small)
    base = run(model, video, t, words)

    def changed(*args: jax.Array) -> list[int]:
        return np.flatnonzero(np.abs(run(model, *args) - base).max((1, 2, 3, 4)) > 1e-6).tolist()

    assert changed(video.at[2].add(1.0), t, words) == [2]
    assert changed(video, t.at[3].set(0.0), words) == [3]
    assert changed(video, t, words.at[0, 3].set(6)) == [0]


def test_padding_of_a_prompt_is_not_read(small: Settings):
    model, (video, t, words) = built(small), inputs(small)
    base = run(model, video, t, words)
    # The table's row for padding is changed: nothing that is attended to moves.
    table = model.text_encoder.table.embedding
    table[...] = table[...].at[text.PAD].add(10.0)
    np.testing.assert_allclose(run(model, video, t, words), base, atol=1e-6)


def test_keys_and_values_of_a_prompt_made_once_are_the_same(small: Settings):
    model, (video, t, words) = built(small), inputs(small)
    at_once = nnx.jit(lambda m, *args: m(*args, m.encode(args[2])))(model, video, t, words)
    np.testing.assert_allclose(at_once, run(model, video, t, words), atol=1e-6)


def test_patches_come_back():
    video = jnp.arange(2 * 4 * 6 * 6 * 3.0).reshape(2, 4, 6, 6, 3)
    tokens = patchify(video, (2, 3, 2))
    assert tokens.shape == (2, 2 * 2 * 3, 2 * 3 * 2 * 3)
    # The second token is the box one step to the right, first frames and first rows.
    np.testing.assert_array_equal(tokens[0, 1], video[0, :2, :3, 2:4].reshape(-1))
    np.testing.assert_array_equal(unpatchify(tokens, (2, 2, 3), (2, 3, 2)), video)


def loss_and_gradient(settings: Settings) -> tuple[jax.Array, jax.Array, Any]:
    model, (video, t, words) = built(settings), inputs(settings)

    @nnx.jit
    def both(model: WanTransformer) -> tuple[jax.Array, jax.Array, Any]:
        loss, gradient = nnx.value_and_grad(loss_of)(
            model, video, words, jax.random.key(3), settings.training
        )
        return model(video, t, words), loss, gradient

    return both(model)
