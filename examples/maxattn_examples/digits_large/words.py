"""Prompts of digits, such as "a red three leaving left and a blue seven bouncing up".

The states of a prompt are what a text encoder would give: each word's own vector, the words that
stand beside it in its phrase, and the number of the phrase. Articles and "and" have no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from maxattn.errors import InputError, did_you_mean
from maxattn_examples.digits.words import DIGITS

COLOURS = {
    "red": (1.0, 0.0, 0.0), "green": (0.0, 1.0, 0.0), "blue": (0.0, 0.0, 1.0),
    "yellow": (1.0, 1.0, 0.0), "cyan": (0.0, 1.0, 1.0), "pink": (1.0, 0.0, 1.0),
}  # fmt: skip
PATHS = ("bouncing", "leaving", "crossing")
WAYS = ("left", "right", "up", "down")
GROUPS = (tuple(COLOURS), DIGITS, PATHS, WAYS)
VOCABULARY = sum(GROUPS, ())
MOST = 3  # digits of a clip
LENGTH = MOST * len(GROUPS)  # states of a prompt
WIDTH = 2 * len(VOCABULARY) + MOST  # numbers of a state
FORM = 'write it as "a red three leaving left and a blue seven bouncing up"'
_FIRST = np.cumsum([0, *map(len, GROUPS[:-1])])
# Six numbers of a state are not zero: so its root mean square is near 1.
_SIZE = 3.0


class Phrase(NamedTuple):
    """One digit of a prompt, by numbers.

    Args:
        colour: of `COLOURS`.
        digit: 0 to 9.
        path: of `PATHS`.
        way: of `WAYS`.
    """

    colour: int
    digit: int
    path: int
    way: int

    def __str__(self) -> str:
        words = (group[i] for group, i in zip(GROUPS, self, strict=True))
        return f"a {' '.join(words)}".replace("a eight", "an eight")


def prompt_of(phrases: Sequence[Phrase]) -> str:
    """Write the prompt of these digits."""
    return " and ".join(map(str, phrases))


def read(prompt: str) -> list[Phrase]:
    """Read a prompt; the empty one has no phrases.

    Raises:
        InputError: it is not written as `prompt_of` writes it.
    """
    phrases = [_phrase(words, prompt) for words in prompt.lower().split(" and ") if words.strip()]
    if len(phrases) > MOST:
        rule = f"a prompt names at most {MOST} digits, and this names {len(phrases)}"
        raise InputError("prompt", repr(prompt), rule, FORM)
    return phrases


def _phrase(words: str, prompt: str) -> Phrase:
    said = [word for word in words.split() if word not in ("a", "an")]
    if len(said) != len(GROUPS):
        rule = "a digit has a colour, a name, a path and a direction"
        raise InputError("prompt", repr(prompt), rule, FORM)
    for word, group in zip(said, GROUPS, strict=True):
        if word not in group:
            rule = f"'{word}' is in the place of one of {', '.join(group)}"
            raise InputError("prompt", repr(prompt), rule, did_you_mean(word, group) or FORM)
    return Phrase(*(group.index(word) for word, group in zip(said, GROUPS, strict=True)))


def encode(prompts: Sequence[str]) -> Float[np.ndarray, "B S D"]:
    """Return the states of prompts.

    Raises:
        InputError: a prompt cannot be read.
    """
    numbers = np.full((len(prompts), MOST, len(GROUPS)), -1, np.int32)
    for row, prompt in zip(numbers, prompts, strict=True):
        for place, phrase in enumerate(read(prompt)):
            row[place] = phrase
    return np.asarray(states(jnp.asarray(numbers)))


def states(numbers: Int[Array, "B phrases groups"]) -> Float[Array, "B S D"]:
    """Return the states of prompts that are given as phrases of numbers; -1 is no phrase."""
    there = (numbers[..., :1] >= 0)[..., None]
    own = jax.nn.one_hot(numbers + _FIRST, len(VOCABULARY))
    beside = jnp.broadcast_to(own.sum(-2, keepdims=True), own.shape)
    place = jnp.broadcast_to(jnp.eye(MOST)[:, None], (*own.shape[:-1], MOST))
    both = jnp.where(there, jnp.concatenate([own, beside, place], -1), 0.0)
    return _SIZE * both.reshape(len(numbers), LENGTH, WIDTH)
