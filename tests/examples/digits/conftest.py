"""One classifier for all judges of these tests: each would fit the same one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from maxattn_examples.digits import judge
from maxattn_examples.digits.torus import Scans


@pytest.fixture(scope="session", autouse=True)
def fitted_once() -> Iterator[None]:
    fit = judge.fitted

    @cache
    def layers(digit: int, seed: int) -> judge.Layers:
        return fit(Scans.of("train"), digit, seed)

    def fitted(scans: Any, digit: int, seed: int = 0) -> judge.Layers:
        return layers(digit, seed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge, "fitted", fitted)
        yield
