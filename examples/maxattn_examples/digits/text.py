"""Words to tokens to vectors: the smallest thing that does what Wan's text encoder does.

A prompt is at most `LENGTH` words of a closed vocabulary. A shorter one is padded, and the padding
is masked; the empty prompt, which classifier-free guidance needs, has nothing to attend to at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from maxattn.errors import InputError, did_you_mean
from maxattn.masks import KeyPadding

from .words import VOCABULARY

PAD = 0
LENGTH = 4
_IDS = {word: i for i, word in enumerate(VOCABULARY)}


def encode(prompts: Sequence[str]) -> Int[np.ndarray, "B S"]:
    """Turn prompts into token ids, padded with `PAD` to `LENGTH` words.

    Raises:
        InputError: a word outside the vocabulary, or more than `LENGTH` words.
    """
    tokens = np.full((len(prompts), LENGTH), PAD, np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        words = prompt.lower().split()
        if len(words) > LENGTH:
            rule = f"a prompt has at most {LENGTH} words, and this has {len(words)}"
            raise InputError("prompt", repr(prompt), rule, 'write it as "a seven moving left"')
        row[: len(words)] = [_id_of(word, prompt) for word in words]
    return tokens


def _id_of(word: str, prompt: str) -> int:
    if word == VOCABULARY[PAD] or word not in _IDS:
        hint = did_you_mean(word, VOCABULARY[1:]) or f"use the words {', '.join(VOCABULARY[1:])}"
        rule = f"every word is in the vocabulary, and '{word}' is not"
        raise InputError("prompt", repr(prompt), rule, hint)
    return _IDS[word]


def padding_mask(tokens: Int[Array, "B S"]) -> KeyPadding:
    """Let a video attend to the words of its prompt and to no padding."""
    return KeyPadding((tokens != PAD).sum(-1).astype(jnp.int32))


def drop(tokens: Int[Array, "B S"], rate: float, key: Array) -> Int[Array, "B S"]:
    """Replace each prompt by the empty one with probability `rate`."""
    return jnp.where(jax.random.bernoulli(key, rate, (tokens.shape[0], 1)), PAD, tokens)


class TextEncoder(nnx.Module):
    """Look each word up in a table, then two layers with a tanh gelu between, as in Wan.

    Args:
        dim: width of the vectors.
        rngs: source of the initial parameters.
    """

    def __init__(self, dim: int, *, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(len(VOCABULARY), dim, rngs=rngs)
        self.linear_1 = nnx.Linear(dim, dim, rngs=rngs)
        self.linear_2 = nnx.Linear(dim, dim, rngs=rngs)

    def __call__(self, tokens: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        """Turn token ids into vectors."""
        return self.linear_2(nnx.gelu(self.linear_1(self.table(tokens)), approximate=True))
