"""How many examples a property is tried with: few in `make test`, all in `make test-all`."""

from __future__ import annotations

import os

from hypothesis import settings


def tries(count: int) -> settings:
    """Try `count` examples where MAXATTN_TEST_ALL is set, as `make test-all` does; else half."""
    most = count if os.environ.get("MAXATTN_TEST_ALL") else count // 2
    return settings(max_examples=most, deadline=None)
