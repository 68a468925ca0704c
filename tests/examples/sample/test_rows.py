"""The batch of a run: the text and the noise of each row, in one model call or two."""

from __future__ import annotations

import numpy as np
import pytest
from maxattn_examples.sample.inputs import Rows, noise, told_in_rows

TEXT, NEGATIVE = np.arange(3.0).reshape(3, 1, 1), np.full((1, 1, 1), -1.0)


def test_every_prompt_has_its_samples_and_one_negative_prompt_goes_with_all() -> None:
    rows = Rows(texts=3, count=2, calls=2, ways=1)
    (both,) = told_in_rows({"text": TEXT, "negative_text": NEGATIVE}, rows, guided=True)
    np.testing.assert_array_equal(both["text"].ravel(), [-1] * 6 + [0, 0, 1, 1, 2, 2])
    two = told_in_rows({"text": TEXT, "negative_text": NEGATIVE}, Rows(3, 2, 1, 1), guided=True)
    np.testing.assert_array_equal([x["text"].ravel() for x in two], [[-1] * 6, [0, 0, 1, 1, 2, 2]])
    (alone,) = told_in_rows({"text": TEXT}, Rows(3, 2, 1, 1), guided=False)
    np.testing.assert_array_equal(alone["text"].ravel(), [0, 0, 1, 1, 2, 2])


@pytest.mark.parametrize(
    ("texts", "calls", "ways", "samples"),
    [(1, 2, 8, 4), (1, 1, 8, 8), (3, 2, 4, 4), (5, 2, 1, 5), (4, 2, 3, 6)],
)
def test_rows_fill_the_devices(texts: int, calls: int, ways: int, samples: int) -> None:
    rows = Rows(texts, 1, calls, ways)
    assert rows.samples == samples
    assert rows.spread(TEXT[:1]).shape[0] == samples
    assert ("fill up" in str(rows)) == (samples != texts)


def test_noise_of_a_row_depends_on_seed_and_row_alone() -> None:
    few, many = (noise(3, Rows(n, 1, 1, 1), (2, 2)) for n in (2, 5))
    np.testing.assert_array_equal(few, many[:2])
    assert (few != noise(4, Rows(2, 1, 1, 1), (2, 2))).all()
