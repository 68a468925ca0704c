"""Imports in examples/ point downward only, and take of maxattn what is public."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

# From the top; a part may import parts of the rows below its own, and nothing of its own row.
LAYERS = (
    ("scripts",),
    ("measuring",),
    ("digits", "wan", "sdxl", "flux"),
    ("train", "sample"),
    ("rollout",),
    ("samplers",),
    ("common",),
)
LAYER = {part: i for i, row in enumerate(LAYERS) for part in row}

# What an example may import of maxattn.
PUBLIC = {
    "maxattn", "maxattn.config", "maxattn.devices", "maxattn.errors", "maxattn.masks",
    "maxattn.modules", "maxattn.rope", "maxattn.sharding", "maxattn.streaming",
    "maxattn.weights",
}  # fmt: skip


def part_of(path: Path) -> str:
    """Return the part of examples/ that a file belongs to; files beside the folders are scripts."""
    inside = path.relative_to(EXAMPLES).parts
    return inside[0] if len(inside) > 1 else "scripts"


def imported(source: str) -> Iterator[str]:
    """Yield the absolute modules that a file imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module
            # `from maxattn import sharding` takes a module, `from maxattn import plan` does not.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_imported(module: str) -> str | None:
    """Return the part of examples/ that a module is in; None for other packages."""
    top = module.partition(".")[0]
    return "scripts" if (EXAMPLES / f"{top}.py").is_file() else top if top in LAYER else None


def upward(part: str, source: str) -> list[str]:
    """List the imports of a part's file that do not point to a lower layer."""
    wanted = ((module, part_imported(module)) for module in imported(source))
    return [
        f"{part} -> {module}"
        for module, other in wanted
        if other is not None and other != part and LAYER[other] <= LAYER[part]
    ]


def deep(source: str) -> set[str]:
    """Return the modules inside of maxattn, not public, that a file imports."""
    root = EXAMPLES.parent
    found = {module for module in imported(source) if module.partition(".")[0] == "maxattn"}
    modules = {m for m in found if list(root.glob(f"{m.replace('.', '/')}.py")) or is_package(m)}
    return modules - PUBLIC


def is_package(module: str) -> bool:
    return (EXAMPLES.parent / module.replace(".", "/") / "__init__.py").is_file()


FILES = sorted(path for path in EXAMPLES.rglob("*.py"))


def test_every_folder_of_examples_has_a_layer():
    folders = {path.parent.name for path in EXAMPLES.glob("*/*.py")}
    assert folders == LAYER.keys() - {"scripts"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_imports_point_downward(path: Path):
    source = path.read_text()
    assert not upward(part_of(path), source)
    assert not deep(source), "take what is public, or copy it into examples/common"


UP = [
    ("common", "from train.loop import Training"),
    ("train", "def f():\n    from wan.model import WanTransformer3D"),
    ("flux", "from wan.model import WanTransformer3D"),
    ("measuring", "import measure"),
]


def test_the_checks_see_wrong_imports_and_no_others():
    for part, line in UP:
        assert upward(part, line), line
    for line in ("from train.loop import Training", "import samplers", "import jax"):
        assert not upward("wan", line), line
    for line in ("from maxattn import kernels", "import maxattn.weights.files"):
        assert deep(line), line
    assert not deep("from maxattn import sharding, weights\nimport maxattn as ma")
