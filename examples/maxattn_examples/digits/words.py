"""The closed vocabulary of the digits' model: ten digits, four directions, forty prompts."""

from __future__ import annotations

from difflib import get_close_matches
from itertools import product

SIDE = 8  # pixels along a side of a digit of scikit-learn's load_digits
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# Rows and columns a frame.
STEPS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
DIRECTIONS = tuple(STEPS)
VOCABULARY = ("<pad>", "a", "an", "moving", *DIRECTIONS, *DIGITS)


def prompt_of(digit: int, direction: str) -> str:
    """Write the prompt of a digit and a direction, such as "a seven moving left"."""
    return f"{'an' if digit == 8 else 'a'} {DIGITS[digit]} moving {direction}"


def all_prompts() -> dict[str, tuple[int, str]]:
    """List the forty prompts, each with its digit and direction."""
    pairs = product(range(10), DIRECTIONS)
    return {prompt_of(digit, direction): (digit, direction) for digit, direction in pairs}


def suggest(prompt: str) -> str:
    """Name the prompt most like this one."""
    close = get_close_matches(prompt, list(all_prompts()), n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else f"write it as '{prompt_of(7, 'left')}'"
