"""Messages have no character that a terminal cannot print, and no control characters."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxattn as ma
from maxattn.errors import InputError, MaxattnError, escaped_output
from maxattn.tools.cli import main
from maxattn.tools.tune.store import opened

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
        hold_printable(str(caught.value), name)


def hold_printable(text: str, name: str = "") -> None:
    assert text and all(c.isprintable() or c == "\n" for c in text), (name, text)
    text.encode()


@pytest.mark.parametrize("odd", ODD)
def test_log_records_are_printable(odd: str, caplog: pytest.LogCaptureFixture) -> None:
    word, layer = ODD[odd], nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    weights = {"kernel": np.ones((2, 2), "f"), f"a{word}": np.ones(2, "f")}
    with caplog.at_level(logging.INFO):
        ma.weights.load_diffusers(layer, weights, strict=False)
        logging.getLogger("maxattn.measuring").info("compiling %s", word)
    assert len(caplog.messages) == 2
    for text in caplog.messages:
        hold_printable(text)


@pytest.mark.parametrize("odd", ODD)
def test_commands_print_what_is_printable(odd: str, tmp_path: Path, monkeypatch, capsys: Any):
    word = ODD[odd]
    for words in ([word], ["check", f"--{word}"], ["explain", f"--shape={word}"]):
        assert main(words) in (1, 2)
        hold_printable("".join(capsys.readouterr()))
    if odd in ("half", "NUL"):  # no file has such a name
        return
    (tmp_path / word).mkdir()
    config = tmp_path / word / "a.yml"
    config.write_text("attention: flash\n")
    assert main(["check", str(config)]) == 0
    hold_printable(capsys.readouterr().out)
    monkeypatch.setenv("MAXATTN_CACHE", str(tmp_path / word))
    (tmp_path / word / "tuned.json").write_text("{")
    with escaped_output(), opened() as kept:
        kept.say(word)
    said = capsys.readouterr().out
    assert "is damaged" in said
    hold_printable(said)


def test_a_bar_still_drives_the_terminal(capsys: Any) -> None:
    with escaped_output():
        print("\x1b[2K", end="")
        print("\x1b[2K", end="", file=getattr(sys.stdout, "stream", sys.stdout))
    assert capsys.readouterr().out == "\\u001b[2K\x1b[2K"
