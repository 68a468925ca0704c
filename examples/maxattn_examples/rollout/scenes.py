"""Scenes of a video: a prompt, and the prompts that later blocks change to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from maxattn.errors import ConfigError

SWITCH = re.compile(r"\s*(\d+)\s*(?::\s*(.*\S)\s*)?", re.DOTALL)


class Scene(NamedTuple):
    """The prompt that is shown from a block on.

    Args:
        block: the number of its first block.
        prompt: what is shown; None where an embeddings file says it.
    """

    block: int
    prompt: str | None


def scenes_of(prompt: str | None, switches: Sequence[str]) -> tuple[Scene, ...]:
    """Read the scenes of a video.

    Args:
        prompt: of the first one.
        switches: "BLOCK: PROMPT", or "BLOCK" where a file says what is shown; in their order.

    Raises:
        ConfigError: one is not written so, or two begin with one block.
    """
    scenes = (Scene(0, prompt), *map(_switch, switches))
    for before, after in pairwise(scenes):
        if after.block <= before.block:
            rule = f"scenes follow one another, and the one before begins with block {before.block}"
            raise ConfigError("--switch", after.block, rule, "name a later block")
    return scenes


def scene_errors(scenes: Sequence[Scene], blocks: int, given: int | None) -> Iterator[ConfigError]:
    """Yield scenes that are never shown, and those without a prompt.

    Args:
        scenes: of the video.
        blocks: that are made.
        given: rows of text in an embeddings file; None without one.
    """
    for scene in (s for s in scenes[1:] if s.block >= blocks):
        rule = f"the {blocks} blocks that are made are numbered from 0"
        yield ConfigError("--switch", scene.block, rule, "raise --blocks, or leave it out")
    if given is None and any(scene.prompt is None for scene in scenes[1:]):
        rule = "a new scene needs a prompt, or text of --embeddings"
        yield ConfigError("--switch", "a block alone", rule, 'write such as "40: a red fox"')
    if given is not None and any(scene.prompt for scene in scenes):
        rule = "prompts come from --embeddings or from options, not from both"
        yield ConfigError("--embeddings", "given beside a prompt", rule, "write --switch BLOCK")
    if given is not None and given != len(scenes):
        rule = f"its text has a row for each of the {len(scenes)} scenes"
        yield ConfigError("--embeddings", f"{given} rows", rule, "encode as many prompts")


def _switch(text: str) -> Scene:
    if (found := SWITCH.fullmatch(text)) is None:
        rule = "it is the number of a block, and the prompt from that block on"
        raise ConfigError("--switch", repr(text), rule, 'write such as "40: a red fox"')
    return Scene(int(found[1]), found[2])
