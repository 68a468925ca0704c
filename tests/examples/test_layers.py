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
    ("compare",),
    ("digits_large",),
    ("digits", "wan", "sdxl", "flux"),
    ("train", "sample"),
    ("rollout",),
    ("fast",),
    ("samplers",),
    ("common",),
)
LAYER = {part: i for i, row in enumerate(LAYERS) for part in row}

# What an example may import of maxattn.
PUBLIC = {"maxattn"} | {
    f"maxattn.{name}"
    for name in (
        "config", "devices", "errors", "masks", "modules", "rope", "sharding", "streaming",
        "weights",
    )
}  # fmt: skip


def imported(source: str) -> Iterator[str]:
    """Yield the absolute modules that a file imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module
            # `from maxattn import sharding` takes a module, `from maxattn import plan` does not.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def wrong(part: str, source: str) -> list[str]:
    """List the imports of a part's file that point to no lower layer, or inside of maxattn."""
    found = []
    for module in imported(source):
        top, path = module.partition(".")[0], EXAMPLES.parent / module.replace(".", "/")
        other = "scripts" if (EXAMPLES / f"{top}.py").is_file() else top
        if other in LAYER and other != part and LAYER[other] <= LAYER[part]:
            found.append(f"{part} -> {module}")
        is_module = path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
        if top == "maxattn" and is_module and module not in PUBLIC:
            found.append(f"{module}: take what is public, or copy it into examples/common")
    return found


FILES = sorted(path for path in EXAMPLES.rglob("*.py"))


def test_every_folder_of_examples_has_a_layer():
    folders = {path.parent.name for path in EXAMPLES.glob("*/*.py")}
    assert folders == LAYER.keys() - {"scripts"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_imports_point_downward(path: Path):
    inside = path.relative_to(EXAMPLES).parts
    assert not wrong(inside[0] if len(inside) > 1 else "scripts", path.read_text())


WRONG = [
    ("common", "from train.loop import Training"),
    ("train", "def f():\n    from wan.model import WanTransformer3D"),
    ("flux", "from wan.model import WanTransformer3D"),
    ("compare", "import drift"),
    ("wan", "from maxattn import kernels"),
    ("wan", "import maxattn.weights.files"),
]
RIGHT = ["from train.loop import Training", "import samplers", "import jax", "import maxattn as ma"]


def test_the_check_sees_wrong_imports_and_no_others():
    assert all(wrong(part, line) for part, line in WRONG)
    assert not any(wrong("wan", line) for line in (*RIGHT, "from maxattn import sharding, weights"))
