"""Two small languages for prompts, and a text encoder's states for them.

    SCENES   "a red three leaving left and a blue seven bouncing up"
    TORUS    "a seven moving left"

A phrase names one digit. Each of its words has a state: the word's own vector, the other words of
the phrase, and the number of the phrase. Articles, "and" and "moving" have no state, and the states
of the empty prompt are zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from maxattn.errors import InputError, did_you_mean

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COLOURS = {
    "red": (1.0, 0.0, 0.0), "green": (0.0, 1.0, 0.0), "blue": (0.0, 0.0, 1.0),
    "yellow": (1.0, 1.0, 0.0), "cyan": (0.0, 1.0, 1.0), "pink": (1.0, 0.0, 1.0),
}  # fmt: skip
PATHS = ("bouncing", "leaving", "crossing")
WAYS = ("left", "right", "up", "down")
STEPS = np.array([(0, -1), (0, 1), (-1, 0), (1, 0)])  # rows and columns, of each of these
_SIZE = 3.0  # brings the root mean square of a state near 1

Phrase = tuple[int, ...]
"""The numbers of a phrase's words, each in its group."""


@dataclass(frozen=True)
class Language:
    """Prompts of a closed vocabulary.

    Args:
        form: a phrase with {} for each of its words.
        groups: the words allowed in each place.
        most: largest number of phrases in a prompt.
        example: a prompt, for errors.
    """

    form: str
    groups: tuple[tuple[str, ...], ...]
    most: int
    example: str

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """All words that have a state."""
        return sum(self.groups, ())

    @property
    def length(self) -> int:
        """The number of states of a prompt."""
        return self.most * len(self.groups)

    @property
    def width(self) -> int:
        """The length of a state."""
        return 2 * len(self.vocabulary) + self.most

    def prompt_of(self, phrases: Sequence[Phrase]) -> str:
        """Write phrases as a prompt."""
        words = ([group[i] for group, i in zip(self.groups, p, strict=True)] for p in phrases)
        said = (self.form.format(*some).replace("a eight", "an eight") for some in words)
        return " and ".join(said)

    def read(self, prompt: str) -> list[Phrase]:
        """Parse a prompt; the empty one has no phrases.

        Raises:
            InputError: the prompt does not have the form that `prompt_of` writes.
        """
        parts = [words for words in prompt.lower().split(" and ") if words.strip()]
        phrases, form = [self._phrase(words, prompt) for words in parts], self._remedy
        if len(phrases) > self.most:
            rule = f"a prompt names at most {self.most} digits, and this names {len(phrases)}"
            raise InputError("prompt", repr(prompt), rule, form)
        return phrases

    @property
    def _remedy(self) -> str:
        return f'write it as "{self.example}"'

    def _phrase(self, words: str, prompt: str) -> Phrase:
        silent = {"a", "an", *self.form.replace("{}", "").split()}
        said = [word for word in words.split() if word not in silent]
        if len(said) != len(self.groups):
            names = [f"({' or '.join(group[:2])}, ...)" for group in self.groups]
            rule = f"a digit has {len(self.groups)} words: {self.form.format(*names)}"
            raise InputError("prompt", repr(prompt), rule, self._remedy)
        for word, group in zip(said, self.groups, strict=True):
            if word not in group:
                rule = f"'{word}' is in the place of one of {', '.join(group)}"
                remedy = did_you_mean(word, group) or self._remedy
                raise InputError("prompt", repr(prompt), rule, remedy)
        return tuple(group.index(word) for word, group in zip(said, self.groups, strict=True))

    def numbers(self, prompts: Sequence[str]) -> Int[np.ndarray, "B phrases groups"]:
        """Return prompts as word numbers, -1 for a missing phrase; raises as `read`."""
        numbers = np.full((len(prompts), self.most, len(self.groups)), -1, np.int32)
        for row, prompt in zip(numbers, prompts, strict=True):
            for place, phrase in enumerate(self.read(prompt)):
                row[place] = phrase
        return numbers

    def encode(self, prompts: Sequence[str]) -> Float[np.ndarray, "B S D"]:
        """Return the states of prompts; raises as `read`."""
        return np.asarray(self.states(jnp.asarray(self.numbers(prompts))))

    def states(self, numbers: Int[Array, "B phrases groups"]) -> Float[Array, "B S D"]:
        """Return the states of prompts that `numbers` has parsed."""
        there = (numbers[..., :1] >= 0)[..., None]
        first = np.cumsum([0, *map(len, self.groups[:-1])])
        own = jax.nn.one_hot(numbers + first, len(self.vocabulary))
        beside = jnp.broadcast_to(own.sum(-2, keepdims=True), own.shape)
        place = jnp.broadcast_to(jnp.eye(self.most)[:, None], (*own.shape[:-1], self.most))
        both = jnp.where(there, jnp.concatenate([own, beside, place], -1), 0.0)
        return _SIZE * both.reshape(len(numbers), self.length, self.width)


SCENES = Language(
    "a {} {} {} {}",
    (tuple(COLOURS), DIGITS, PATHS, WAYS),
    3,
    "a red three leaving left and a blue seven bouncing up",
)
TORUS = Language("a {} moving {}", (DIGITS, WAYS), 1, "a seven moving left")
ALL = {TORUS.prompt_of([(digit, way)]): (digit, way) for digit in range(10) for way in range(4)}
"""The forty prompts of TORUS, each with the numbers of its digit and its way."""
