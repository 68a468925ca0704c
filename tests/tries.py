"""The number of examples of a property test: few in `make test`, all in `make test-all`."""

from __future__ import annotations

import os

from hypothesis import settings


def tries(count: int) -> settings:
    """Run `count` examples if MAXATTN_TEST_ALL is set, as `make test-all` does; else half."""
    most = count if os.environ.get("MAXATTN_TEST_ALL") else count // 2
    return settings(max_examples=most, deadline=None)
