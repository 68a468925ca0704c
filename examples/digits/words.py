"""The closed vocabulary of the demo: ten digits, four directions, forty prompts. Plain Python, no
arrays.
"""

from __future__ import annotations

from difflib import get_close_matches

SIDE = 8  # pixels along a side of a digit of scikit-learn's load_digits
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
STEPS = {
    "left": (0, -1),
    "right": (0, 1),
    "up": (-1, 0),
    "down": (1, 0),
}  # rows and columns a frame
DIRECTIONS = tuple(STEPS)
VOCABULARY = ("<pad>", "a", "an", "moving", *DIRECTIONS, *DIGITS)


def prompt_of(digit: int, direction: str) -> str:
    """Write the prompt of a digit and a direction, such as "a seven moving left"."""
    return f"{'an' if digit == 8 else 'a'} {DIGITS[digit]} moving {direction}"


def all_prompts() -> dict[str, tuple[int, str]]:
    """List the forty prompts, each with its digit and direction."""
    return {
        prompt_of(digit, direction): (digit, direction)
        for digit in range(10)
        for direction in DIRECTIONS
    }


def suggest(prompt: str) -> str:
    """Name the prompt most like this one."""
    close = get_close_matches(prompt, list(all_prompts()), n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else f"write it as '{prompt_of(7, 'left')}'"
