"""Laws of mask algebra, as structures: masks built in different ways are equal values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from maxattn import masks as M
from maxattn.errors import InputError
from tests.fuzz.masks import Tree
from tests.masks.definitions import build, trees
from tests.tries import tries

masks = trees(9, 9).map(build)
leaves = trees(9, 9, 0).filter(lambda leaf: "Rectangles" not in leaf.text()).map(build)
FULL, EMPTY = M.Full(), M.Empty()
laws = tries(60)


@laws
@given(masks, masks)
def test_de_morgan(a: M.Mask, b: M.Mask) -> None:
    assert ~(a & b) == ~a | ~b
    assert ~(a | b) == ~a & ~b


@laws
@given(masks)
def test_one_mask(a: M.Mask) -> None:
    a = a.canonical()
    assert ~~a == a
    assert a & a == a | a == a
    assert a & FULL == a | EMPTY == a
    assert a & EMPTY == EMPTY and a | FULL == FULL
    assert a.canonical() == a


@laws
@given(masks, masks, masks)
def test_two_and_three(a: M.Mask, b: M.Mask, c: M.Mask) -> None:
    assert a & b == b & a and a | b == b | a
    assert (a & b) & c == a & (b & c)
    assert (a | b) | c == a | (b | c)


@laws
@given(leaves, leaves)
def test_absorption_and_complement(a: M.Mask, b: M.Mask) -> None:
    a, b = a.canonical(), b.canonical()
    assert a & (a | b) == a
    assert a | (a & b) == a
    assert a & ~a == EMPTY and a | ~a == FULL


@laws
@given(trees(9, 9))
def test_bind_is_idempotent(tree: Tree) -> None:
    bound = build(tree).bind(9, 9)
    assert bound.is_bound and bound.bind(9, 9) == bound


A, B, C = M.KeyPadding([2, 5]), M.KeyPadding([4, 3]), M.Causal(0)
SAME_STRUCTURE = {
    "and of ors": ((A | B) & (B | A), A | B),
    "or of ands": ((A & B) | (B & A), A & B),
    "three": ((C & A & B) | (C & B & A), C & A & B),
    "through not": (~(~A & ~B) & (B | A), A | B),
    "one absorbs two": ((A | B) & (B | A) & A, A),
}


@pytest.mark.parametrize("name", SAME_STRUCTURE)
def test_masks_of_one_structure_in_another_order(name: str) -> None:
    """Arrays cannot be sorted, so `a | b` and `b | a` stay two values."""
    got, want = (
        np.broadcast_to(x.bind(6, 6, 2).allowed(np.arange(6), np.arange(6)), (2, 1, 6, 6))
        for x in SAME_STRUCTURE[name]
    )
    assert (got == want).all()


def test_kinds_that_are_another_kind() -> None:
    assert M.LocalWindow(None, None).canonical() == M.Full()
    assert M.LocalWindow(None, 0).canonical() == M.Causal()
    assert M.BlockCausal(1, offset=3).canonical() == M.Causal(3)
    assert M.BlockSlidingWindow(1, 4).canonical() == M.LocalWindow(3, 0)
    assert M.LocalWindow(None, None).is_full and not M.Causal().is_full

    assert M.Rectangle(1, 5, 2, 2).canonical() == M.Empty()
    assert M.Rectangle(1, 5, 2, 2) | M.Causal() == M.Causal()
    assert hash(M.Rectangle(1, 5, 2, 3)) == hash(M.Rectangle(1, 5, 2, 3)) != hash(M.Causal())


def test_masks_with_arrays() -> None:
    x, y = M.KeyPadding(np.array([1, 2])), M.KeyPadding(np.array([1, 2]))
    assert x & x == x and x != y, "arrays are equal when they are the same array"
    # equal structures keep the order given
    assert (x & y).parts() == (x, y) and (y & x).parts() == (y, x)
    assert x & M.Causal() == M.Causal() & x
    assert x & ~x == M.Empty()
    assert x.form() == y.form() and (x & M.Causal()).form() == (M.Causal() & y).form()


def test_names_terms_period() -> None:
    mask = M.Causal() & M.KeyPadding([3]) & ~M.LocalWindow(0, 0)
    assert mask.names() == ("Causal", "KeyPadding", "LocalWindow")
    assert [t.names() for t in mask.terms()] == [("Causal",), ("KeyPadding",), ("LocalWindow",)]
    assert M.Causal().terms() == (M.Causal(),)
    assert mask.has_data and not M.Causal().has_data
    assert mask.period() is None
    assert M.BlockSlidingWindow(1560, 7).period() == 1560
    assert (M.BlockCausal(4) & M.Causal() | M.BlockCausal(12)).period() == 12
    assert (M.BlockCausal(4) & M.BlockCausal(6)).period() is None
    assert M.VideoMask(21, 1560, 3).period() == 4680
    assert M.VideoMask(21, 1560, 4, first_frame_alone=True).period() == 1560


def test_python_operators_that_would_lose_a_mask_are_refused() -> None:
    with pytest.raises(InputError, match="truth value"):
        M.Causal() and M.KeyPadding([3])
    with pytest.raises(InputError, match="Dense"):
        M.Causal() & np.ones((2, 2), bool)  # pyright: ignore[reportOperatorIssue]
    with pytest.raises(InputError, match="Dense"):
        np.ones((2, 2), bool) | M.Causal()  # pyright: ignore[reportOperatorIssue]


def test_repr_is_the_call() -> None:
    space = {name: getattr(M, name) for name in M.__all__}
    for mask in (
        M.Causal() & ~M.LocalWindow(0, None),
        M.BlockSlidingWindow(1560, 7, offset=3) | M.KeyLimit(4) & M.BlockCausal(2),
        M.VideoMask(21, 1560, 3, window=4, sink=2, first_frame_alone=True),
    ):
        assert eval(repr(mask), space) == mask
    padded = M.KeyPadding(np.zeros(2, np.int32)) & M.Causal()
    assert repr(padded) == "Causal() & KeyPadding(int32[2])"
