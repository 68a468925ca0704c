"""No message has a character that a terminal cannot print, or obeys."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import pytest

import maxattn as ma
from maxattn.errors import InputError, MaxattnError

ODD = {
    "C1": "\x9b31m",
    "escape": "\x1b[31m",
    "half": "\ud800",
    "turn": "\u202eabc\u2066",
    "NUL": "\0",
}


@pytest.mark.parametrize("odd", ODD)
def test_messages_are_printable(odd: str, tmp_path: Path) -> None:
    word = ODD[odd]
    calls = {
        "override": lambda: ma.AttentionConfig.from_overrides([f"attention={word}"]),
        "key": lambda: ma.AttentionConfig.from_overrides([f"{word}=1"]),
        "target": lambda: ma.Target.named(word),
        "value": lambda: ma.AttentionConfig(attention=word),
        "axis": lambda: ma.plan(ma.Call(1, 8, 8, 1, 1, 8), None, {word: 2}),
        "file": lambda: ma.AttentionConfig.from_yaml(str(tmp_path / f"a{word}.yml")),
        "weights": lambda: ma.weights.load_diffusers(ma.masks, str(tmp_path / f"b{word}")),  # type: ignore
        "scale": lambda: ma.attention(*[jnp.ones((1, 8, 1, 8))] * 3, scale=word),  # type: ignore
        "own": lambda: (_ for _ in ()).throw(InputError(word, word, word, word)),
    }
    for name, call in calls.items():
        with pytest.raises(MaxattnError) as caught:
            call()
        text = str(caught.value)
        assert all(c.isprintable() or c == "\n" for c in text), (name, text)
        text.encode()
