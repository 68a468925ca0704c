"""Pictures of masks that cannot be drawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from maxattn import masks as M
from maxattn.errors import InputError


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda at: M.Causal().plot(at / "x.bogus", 8, 8), "path: |the picture is a PNG|in .png"),
        (lambda at: M.Causal().plot(at / "x", 8, 8), "the picture is a PNG"),
        (lambda at: M.Causal().plot(at / "x.png", 0, 8), "q_len: 0|at least one query"),
        (lambda at: M.Causal().show(-1, 4), "q_len: -1|at least one query|give 1 or more"),
        (lambda at: M.Causal().show(0, 0), "q_len: 0"),
        (lambda at: M.Full().show(4, -1), "kv_len: -1|at least one key"),
    ],
)
def test_what_cannot_be_drawn(draw: Callable[[Path], object], words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        draw(tmp_path)
    assert all(each in str(error.value) for each in words.split("|"))
    assert not list(tmp_path.iterdir())
