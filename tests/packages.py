"""Optional packages: tests that need one are skipped if it is not installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from maxattn.tools.compile.process import tpu_python

needs_libtpu = pytest.mark.skipif(
    tpu_python() is None, reason='libtpu is not installed (pip install "maxattn[tpu]")'
)


def skip_without(*packages: str) -> None:
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
