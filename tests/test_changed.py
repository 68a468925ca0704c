"""`make check` runs the tests that mirror changed files."""

from __future__ import annotations

import pytest

from tests.changed import mirror_of


@pytest.mark.parametrize(
    ("file", "tests"),
    {
        "maxattn/masks/blocks.py": {"tests/masks"},
        "maxattn/tools/cli/__init__.py": {"tests/tools/cli"},
        "maxattn/jax_private/__init__.py": set(),
        "maxattn/_remat.py": {"tests/test_remat.py"},
        "examples/maxattn_examples/wan/model.py": {"tests/examples/wan"},
        "tests/masks/definitions.py": {"tests/masks"},
        "tests/masks/test_blocks.py": {"tests/masks/test_blocks.py"},
        "tests/masks/test_that_is_deleted.py": set(),
        "configs/wan_14b.yml": {"tests/config"},
        "docs/results.md": {"tests/test_pages.py", "tests/test_site.py"},
        "CHANGELOG.md": {"tests/test_pages.py"},
        "maxattn/masks/README.md": {"tests/test_pages.py"},
        "LICENSE": set(),
    }.items(),
)
def test_the_mirror_of_a_file(file: str, tests: set[str]) -> None:
    assert set(mirror_of(file)) == tests
