"""Imports in examples/ point downward only, and use only public names of maxattn."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PACKAGE = EXAMPLES / "maxattn_examples"

# From the top; a part may import parts of the rows below its own, and nothing of its own row.
LAYERS = (
    ("scripts",),
    ("compare",),
    ("families", "random_folder"),
    ("digits",),
    ("stream",),
    ("wan", "sdxl", "flux"),
    ("train",),
    ("sample",),
    ("samplers",),
    ("common",),
)
LAYER = {part: i for i, row in enumerate(LAYERS) for part in row}

# What an example may import of maxattn: the public folders, and helpers for files and XLA.
PUBLIC = {"maxattn", "maxattn.weights.replacing"} | {
    f"maxattn.{name}"
    for name in (
        "config", "devices", "errors", "masks", "modules", "rope", "sharding", "steps", "streaming",
        "weights", "tools.writable", "tools.xla_options", "tools.self_forcing",
        "steps.resolve", "steps.value",
    )
}  # fmt: skip


def part_of(path: Path) -> str:
    """Return the part that a file of examples/ belongs to."""
    inside = path.relative_to(EXAMPLES).with_suffix("").parts
    return inside[1] if len(inside) > 1 else "scripts"


def imported(path: Path, source: str) -> Iterator[str]:
    """Yield the absolute modules that a file imports, at its top or in a function."""
    package = path.relative_to(EXAMPLES).parts[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            module = ".".join((*above, *([node.module] if node.module else [])))
            yield module
            # `from maxattn import sharding` takes a module, `from maxattn import plan` does not.
            yield from (f"{module}.{alias.name}" for alias in node.names)


def wrong(path: Path, source: str) -> list[str]:
    """List the imports of a file that point to no lower layer, or to private modules of maxattn."""
    found, part = [], part_of(path)
    for module in imported(path, source):
        top, _, rest = module.partition(".")
        other = "scripts" if (EXAMPLES / f"{top}.py").is_file() else rest.partition(".")[0]
        is_ours = other == "scripts" or (top == "maxattn_examples" and other in LAYER)
        is_allowed = other == part
        if is_ours and not is_allowed and LAYER[other] <= LAYER[part]:
            found.append(f"{part} -> {module}")
        file = EXAMPLES.parent / module.replace(".", "/")
        is_module = file.with_suffix(".py").is_file() or (file / "__init__.py").is_file()
        if top == "maxattn" and is_module and module not in PUBLIC:
            found.append(f"{module}: not public")
    return found


def test_every_part_of_examples_has_a_layer():
    parts = {part_of(path) for path in EXAMPLES.rglob("*.py")} - {"__init__"}
    assert parts == LAYER.keys()


def test_imports_point_downward():
    files = sorted(path for path in EXAMPLES.rglob("*.py") if path.name != "__init__.py")
    found = {path.relative_to(EXAMPLES): wrong(path, path.read_text()) for path in files}
    assert not {path: errors for path, errors in found.items() if errors}


WRONG = [
    ("common/a.py", "from maxattn_examples.train.loop import Training"),
    ("common/a.py", "from ..train.loop import Training"),
    ("train/a.py", "def f():\n    from maxattn_examples.wan.model import WanTransformer3D"),
    ("flux/a.py", "from maxattn_examples import wan"),
    ("train/a.py", "import generate"),
    ("wan/a.py", "from maxattn import kernels"),
    ("wan/a.py", "import maxattn.weights.files"),
]
RIGHT = [
    "from maxattn_examples.train.loop import Training", "from .model import WanTransformer3D",
    "import jax", "import maxattn as ma", "from maxattn import sharding, weights",
]  # fmt: skip


@pytest.mark.parametrize(("file", "line"), WRONG)
def test_the_check_sees_wrong_imports(file: str, line: str):
    assert wrong(PACKAGE / file, line)


def test_the_check_sees_no_others():
    assert not any(wrong(PACKAGE / "wan/a.py", line) for line in RIGHT)
