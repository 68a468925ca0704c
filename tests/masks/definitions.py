"""Drawn masks and their definitions, pair by pair: the trees of tests/fuzz/masks.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

from maxattn import masks as M
from tests.fuzz.masks import Sizes, Tree, draw_tree


def _sizes(q_len: int, kv_len: int) -> Sizes:
    return Sizes(1, q_len, kv_len, 1, 1, 8)


def build(tree: Tree) -> M.Mask:
    """Make the mask that a tree describes."""
    return eval(tree.text(), {"M": M, "np": np})


def table(tree: Tree, q_len: int, kv_len: int) -> np.ndarray:
    """Evaluate a mask at every pair: bool [q_len, kv_len]."""
    return np.broadcast_to(tree.allowed(_sizes(q_len, kv_len)), (q_len, kv_len))


@st.composite
def trees(draw: st.DrawFn, q_len: int, kv_len: int, depth: int = 3) -> Tree:
    """Draw masks of positions, joined by operators."""
    return draw_tree(draw(st.randoms()), _sizes(q_len, kv_len), depth, data=False)


@st.composite
def cases(draw: st.DrawFn, most: int = 40) -> tuple[Tree, int, int]:
    """Draw a tree with lengths that it supports."""
    q_len, kv_len = draw(st.integers(1, most)), draw(st.integers(1, most))
    return draw(trees(q_len, kv_len)), q_len, kv_len


def calls(run: Callable[[], Any]) -> int:
    """Count function calls of Python code, including C functions."""
    count = 0

    def called(_frame: Any, event: str, _of: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(called)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count
