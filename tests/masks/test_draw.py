"""Pictures: characters against golden files; PNG files by size, work and memory."""

from __future__ import annotations

import builtins
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxattn import masks as M
from maxattn.errors import InputError, Unsupported
from maxattn.masks.draw import density
from tests.golden_text import check_golden
from tests.masks.definitions import calls

SHOWN: dict[str, tuple[M.Mask, tuple[int, int, int]]] = {
    "causal": (M.Causal(), (8, 8, 64)),
    "block_window": (M.BlockSlidingWindow(4, 2), (12, 12, 64)),
    "video_sink": (M.VideoMask(7, 2, window=3, sink=1), (14, 14, 64)),
    "chunk": (M.Causal(), (3, 40, 64)),
    "padding": (M.Causal() & M.KeyPadding([5]), (8, 8, 64)),
    "long_causal": (M.Causal(), (1000, 1000, 32)),
    "long_blocks": (M.BlockSlidingWindow(1560, 7), (75_600, 75_600, 64)),
    "long_video": (M.VideoMask(21, 3600, 3, window=4, sink=2), (75_600, 75_600, 42)),
    "long_segments": (
        M.Segments([[0] * 100 + [1] * 200], [[0] * 100 + [1] * 180 + [-1] * 20]),
        (300, 300, 30),
    ),
}


@pytest.mark.parametrize("name", SHOWN)
def test_show(name: str) -> None:
    mask, (q_len, kv_len, width) = SHOWN[name]
    check_golden(f"masks/show_{name}", mask.show(q_len, kv_len, width))
    assert max(map(len, mask.show(q_len, kv_len, width).splitlines()[2:])) <= width


def test_a_small_picture_is_the_mask() -> None:
    mask = M.VideoMask(5, 2, 2, window=2, sink=1) & M.KeyPadding([9, 3])
    for batch in (0, 1):
        rows = [line.replace(" ", "") for line in mask.show(10, 10, batch=batch).splitlines()[2:]]
        got = np.array([[c == "█" for c in row] for row in rows])
        want = mask.bind(10, 10).allowed(np.arange(10), np.arange(10))[batch, 0]
        np.testing.assert_array_equal(got, want)


def test_sampled_density_is_the_share_of_pairs() -> None:
    """Exact while a cell is at most 8 x 8; within a few percent where it is sampled."""
    table = np.random.default_rng(0).random((96, 80)) < 0.3
    exact = table.reshape(12, 8, 10, 8).mean(axis=(1, 3))
    np.testing.assert_allclose(density(M.Dense(table).bind(96, 80), 8, 8, 96, 80), exact)
    sampled = (M.Causal() & M.Dense(np.ones((1, 1), bool))).bind(960, 960)
    known = density(M.Causal(0), 96, 96, 960, 960)
    np.testing.assert_allclose(density(sampled, 96, 96, 960, 960), known, atol=0.1)
    shares = density(M.Causal(offset=0), 10, 10, 95, 95)
    assert (shares > 0).sum() == 55 and shares[0, 0] == 0.55 and shares[9, 9] == 15 / 25


@pytest.mark.parametrize(
    "mask", [M.BlockSlidingWindow(1560, 7), M.VideoMask(21, 3600, 3, 4, 2) & M.KeyPadding([70_000])]
)
def test_a_picture_of_a_long_mask_takes_few_steps_and_little_memory(mask: M.Mask) -> None:
    mask = mask.bind(75_600, 75_600)
    tracemalloc.start()
    steps = calls(lambda: density(mask, 150, 150, 75_600, 75_600))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert steps < 75_600, "one call a query would be so many"
    assert peak < 200 * 2**20, "a table of all pairs would be 5.7e9 bytes"


def test_plot_shows_the_mask(tmp_path: Path) -> None:
    """The picture of a causal mask is dark below the diagonal and light above it."""
    from matplotlib.image import imread

    path = M.Causal().plot(tmp_path / "new folder" / "mask.png", 75_600, 75_600)
    assert path.stat().st_size < 200_000
    pixels = imread(path)[..., :3].mean(axis=2)
    rows, columns = pixels.shape
    middle = pixels[rows // 4 : -rows // 4, columns // 4 : -columns // 4]
    assert np.tril(middle[:, : middle.shape[0]], -20).max() < 0.3
    assert middle[5, -5] > 0.9


def test_without_matplotlib_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(Unsupported, match=r"maxattn\[plot\]"):
        M.Causal().plot(tmp_path / "mask.png", 4, 4)
    assert not (tmp_path / "mask.png").exists()


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda at: M.Causal().plot(at / "x.bogus", 8, 8), "path: |must end in .png"),
        (lambda at: M.Causal().plot(at / "x.png", 0, 8), "q_len: 0|at least one query"),
        (lambda at: M.Causal().show(-1, 4), "q_len: -1|at least one query|give 1 or more"),
        (lambda at: M.Full().show(4, -1), "kv_len: -1|at least one key"),
    ],
)
def test_what_cannot_be_drawn(draw: Callable[[Path], object], words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        draw(tmp_path)
    assert all(each in str(error.value) for each in words.split("|"))
    assert not list(tmp_path.iterdir())
