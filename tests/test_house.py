"""The layout of the repository: imports point one way, and each thing has one place.

`NOT_YET` lists exceptions. It only shrinks: an entry that is not needed fails.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import maxattn as ma
from maxattn.masks import Mask

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "maxattn"

# From the top down: a file imports from its own level's folder, or from lower levels. The tables of
# names are data that the config reads, wherever they stand.
LEVELS = (
    ("maxattn.__main__",),
    ("maxattn.tools",),
    ("maxattn",),
    ("maxattn.auditing",),
    ("maxattn.measuring",),
    ("maxattn.modules", "maxattn.weights"),
    ("maxattn.steps", "maxattn.streaming"),
    ("maxattn._attention", "maxattn._remat"),
    ("maxattn.announce",),
    ("maxattn.decide",),
    ("maxattn._plan",),
    ("maxattn.explain",),
    ("maxattn.context_parallel",),
    ("maxattn.kernels",),
    ("maxattn.block_sizes", "maxattn.rope"),
    ("maxattn.target",),
    ("maxattn.tuned",),
    ("maxattn.call",),
    ("maxattn.masks", "maxattn.config"),
    ("maxattn.sharding",),
    ("maxattn.context_parallel.table",),
    ("maxattn.kernels.table",),
    ("maxattn.devices",),
    ("maxattn.jax_private",),
    ("maxattn.weights.replacing",),
    ("maxattn.errors",),
)

NOT_YET: dict[str, set[str]] = {
    "imports": set(),
    "jax": set(),
    "devices": set(),
    "masks": set(),
    "long files": set(),
    "names of modules": {"maxattn.steps.resolve"},
}


class Source(NamedTuple):
    """One file, parsed."""

    module: str  # its dotted name
    path: str  # from the repository
    tree: ast.Module  # without what only the type checker imports


@cache
def sources() -> tuple[Source, ...]:
    return tuple(_source(path) for path in sorted(PACKAGE.rglob("*.py")))


def _source(path: Path) -> Source:
    within = path.relative_to(ROOT)
    module = ".".join(within.with_suffix("").parts).removesuffix(".__init__")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return Source(module, str(within), _WithoutTypes().visit(tree))


class _WithoutTypes(ast.NodeTransformer):
    """Remove imports for the type checker."""

    def visit_If(self, node: ast.If) -> ast.AST:
        is_types = "TYPE_CHECKING" in ast.unparse(node.test)
        return ast.Pass() if is_types else self.generic_visit(node)


def only_not_yet(what: str, found: Iterable[str]) -> None:
    """Compare offenders with the listed exceptions."""
    found = set(found)
    assert not found - NOT_YET[what], "new"
    assert not NOT_YET[what] - found, "no longer needed in NOT_YET"


# ---- imports -------------------------------------------------------------------------------------


def imported(source: Source) -> Iterator[str]:
    """Yield every module that a file imports, at its top or in a function."""
    modules = {other.module for other in sources()}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{source.path}: imports are absolute"
            inner = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in modules else node.module for name in inner)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (str(a.value) for a in node.args if isinstance(a, ast.Constant))


def level(module: str) -> int:
    """Return the level of a module, given by the longest listed name that contains it."""
    names = {name: number for number, group in enumerate(LEVELS) for name in group}
    above = [name for name in names if module == name or module.startswith(f"{name}.")]
    named = max(above, key=len)
    assert named != "maxattn" or module == "maxattn", f"give {module} a level"
    return names[named]


def climbs(source: Source, module: str) -> bool:
    """Check whether an import points up, or sideways into another folder."""
    if not module.startswith("maxattn"):
        return False
    here, there = level(source.module), level(module)
    folders = {tuple(name.split(".")[:2]) for name in (source.module, module)}
    return here > there or (here == there and len(folders) > 1)


def test_imports_point_one_way() -> None:
    climbing = (f"{s.module} -> {m}" for s in sources() for m in imported(s) if climbs(s, m))
    only_not_yet("imports", climbing)


def test_nothing_but_main_imports_the_tools() -> None:
    assert {name for group in LEVELS for name in group} <= {s.module for s in sources()}
    outside = [s for s in sources() if not s.module.startswith("maxattn.tools")]
    users = {s.module for s in outside for m in imported(s) if m.startswith("maxattn.tools")}
    assert users == {"maxattn.__main__"}
    texts = ((s, n.value) for s in outside for n in ast.walk(s.tree) if isinstance(n, ast.Constant))
    strings = (s.path for s, text in texts if re.match(r"(maxattn\.)?tools\.", str(text)))
    assert not list(strings), "names a file of the tools"


# jax.extend and jax.interpreters are how jax's own guide has a primitive defined.
INSIDE_JAX = re.compile(r"jaxlib\b|jax\._src\b|jax\.lib\b|jax\.experimental\.pallas\.ops\b")


def test_what_is_inside_of_jax_is_taken_in_one_folder() -> None:
    outside = [s for s in sources() if not s.module.startswith("maxattn.jax_private")]
    inside = ((s.module, m) for s in outside for m in imported(s) if INSIDE_JAX.match(m))
    only_not_yet("jax", (f"{module} -> {m}" for module, m in inside))


# ---- words that belong to one place --------------------------------------------------------------

DEVICE_WORD = re.compile(r"(NVIDIA|AMD|TPU|Instinct|MI\d+X?|G?[ABHL]\d{2,3})\b")
SEARCHES = {"startswith", "endswith", "find", "index", "count", "split", "partition"}


def parts_of_device_names(tree: ast.AST) -> Iterator[str]:
    """Yield the tests for a part of a device's name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            words = [node.left, *node.comparators]
            is_part = any(isinstance(op, ast.In | ast.NotIn) for op in node.ops)
            if any(map(_is_device_word, words)) or (is_part and _is_kind(node.comparators[-1])):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            searched = _is_kind(node.func.value) or any(map(_is_device_word, node.args))
            if node.func.attr in SEARCHES and searched:
                yield ast.unparse(node)


def _is_device_word(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and bool(DEVICE_WORD.match(node.value))
        and node.value not in VENDORS
    )


VENDORS = ("NVIDIA", "AMD")  # a row's vendor is compared with these


def _is_kind(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node).endswith("device_kind")


def test_no_other_file_tests_a_part_of_a_device_s_name() -> None:
    others = [s for s in sources() if s.module != "maxattn.devices"]
    only_not_yet("devices", (s.module for s in others for _ in parts_of_device_names(s.tree)))


TESTS = """
"H100" in target.device_kind
any(name in target.device_kind for name in names)
kind.startswith("TPU v")
target.device_kind.startswith(names)
name == "NVIDIA H200"
"""


@pytest.mark.parametrize("text", TESTS.strip().splitlines())
def test_a_test_of_a_device_s_name_is_seen(text: str) -> None:
    assert list(parts_of_device_names(ast.parse(text)))


def mask_classes() -> set[str]:
    """Return the names of all mask classes except the base."""
    found, todo = set(), [Mask]
    while todo:
        subclasses = todo.pop().__subclasses__()
        todo += subclasses
        found |= {c.__name__ for c in subclasses if c.__module__.startswith("maxattn.masks")}
    return found


def class_tests(tree: ast.AST, classes: set[str]) -> Iterator[str]:
    """Yield code that checks a mask's class, or has a class name in a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            named = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
            named |= {n.attr for n in ast.walk(node.args[1]) if isinstance(n, ast.Attribute)}
            if named & classes:
                yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and node.value in classes:
            yield str(node.value)
        elif isinstance(node, ast.MatchClass) and ast.unparse(node.cls) in classes:
            yield ast.unparse(node.cls)


def test_no_other_file_asks_for_a_mask_s_class() -> None:
    others = [s for s in sources() if not s.module.startswith("maxattn.masks")]
    classes = mask_classes()
    assert {"Causal", "KeyPadding", "VideoMask"} <= classes
    only_not_yet("masks", (s.module for s in others for _ in class_tests(s.tree, classes)))


@pytest.mark.parametrize(
    "text", ["isinstance(m, Causal)", "isinstance(m, (A, masks.Dense))", 'CELLS = {"Causal": 1}']
)
def test_a_test_of_a_mask_s_class_is_seen(text: str) -> None:
    assert list(class_tests(ast.parse(text), mask_classes()))


# ---- names ---------------------------------------------------------------------------------------


def test_no_two_classes_share_a_name() -> None:
    """Private classes are compared without the underscore."""
    files: dict[str, list[str]] = {}
    for source in sources():
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name.lstrip("_"), []).append(source.path)
    assert len(files) > 200
    assert not {name: paths for name, paths in files.items() if len(paths) > 1}


def test_no_package_has_a_function_under_the_name_of_its_file() -> None:
    modules = {source.module for source in sources()}
    packages = [s for s in sources() if s.path.endswith("__init__.py")]
    offered = {f"{s.module}.{name}" for s in packages for name in _bound(s)}
    offered |= {f"maxattn.{name}" for name in ma._HOME_OF}
    only_not_yet("names of modules", offered & modules)


def _bound(source: Source) -> Iterator[str]:
    """Return the names that a package defines or imports at its top, without its own files."""
    for node in source.tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom) and node.module != source.module:
            yield from (alias.asname or alias.name for alias in node.names)


# ---- sizes ---------------------------------------------------------------------------------------


def listing(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name != "__pycache__")


def test_a_listing_fits_on_a_screen() -> None:
    assert len(listing(PACKAGE)) <= 30
    assert sum(name.endswith(".py") for name in listing(PACKAGE / "kernels")) <= 17


def test_no_file_is_long() -> None:
    texts = {s.path: (ROOT / s.path).read_text(encoding="utf-8") for s in sources()}
    only_not_yet("long files", (path for path in texts if len(texts[path].splitlines()) > 400))


# Lines at most, of the whole tree.
BUDGETS: dict[str, tuple[int, tuple[str, ...]]] = {
    "maxattn": (43_300, ("maxattn",)),
    "kernels/fa4": (3_000, ("maxattn/kernels/fa4",)),
    "kernels/auto": (600, ("maxattn/kernels/auto",)),
    "row kernels": (
        1_500,
        tuple(
            f"maxattn/modules/{name}"
            for name in ("norm_rope", "norm_rope_tpu", "adaptive_layer_norm", "row_kernel")
        ),
    ),
    "steps": (1_312, ("maxattn/steps",)),
    "examples": (17_500, ("examples",)),
    "benchmarks": (2_720, ("benchmarks",)),
    "tests": (46_300, ("tests",)),
}
PAGES = 5_850  # lines of docs/*.md and docs/*/*.md
DENSITY = 0.811  # statements for each line of code: lines may not get longer in place of fewer


def lines_of(places: Iterable[str]) -> int:
    """Count the lines of files and of folders with all that is in them."""
    files = (f for x in places for f in (*ROOT.glob(f"{x}.py"), *ROOT.glob(f"{x}/**/*.py")))
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


@pytest.mark.parametrize("part", BUDGETS)
def test_a_part_keeps_to_its_budget(part: str) -> None:
    budget, places = BUDGETS[part]
    assert lines_of(places) <= budget


def test_pages_keep_to_their_budget() -> None:
    pages = (*ROOT.glob("docs/*.md"), *ROOT.glob("docs/*/*.md"))
    assert sum(len(page.read_text(encoding="utf-8").splitlines()) for page in pages) <= PAGES


def statements_and_lines(text: str) -> tuple[int, int]:
    """Count the statements and the lines of code of a file, without docstrings and comments."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    prose = [n for n in nodes if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    skipped = {line for n in prose for line in range(n.lineno, (n.end_lineno or 0) + 1)}
    code = (line.strip() for n, line in enumerate(text.splitlines(), 1) if n not in skipped)
    return len(nodes) - len(prose), sum(bool(line) and not line.startswith("#") for line in code)


def test_lines_do_not_get_denser() -> None:
    folders = ("maxattn", "examples", "benchmarks", "tests")
    files = (file for folder in folders for file in ROOT.glob(f"{folder}/**/*.py"))
    counts = [statements_and_lines(file.read_text(encoding="utf-8")) for file in files]
    assert sum(s for s, _ in counts) / sum(n for _, n in counts) <= DENSITY


@pytest.mark.parametrize(("folder", "most"), [("maxattn/kernels/fa4", 13), ("examples", 95)])
def test_a_part_has_few_files(folder: str, most: int) -> None:
    assert len([*ROOT.glob(f"{folder}/**/*.py")]) <= most


FA4 = "maxattn.kernels.fa4"
FA4_IMPORTS = ("kernels.base", "kernels.softmax", "masks", "call", "target", "config", "devices")


def test_fa4_could_be_a_package_of_its_own() -> None:
    allowed = (FA4, *(f"maxattn.{name}" for name in (*FA4_IMPORTS, "errors", "jax_private")))
    for source in sources():
        ours = {m for m in imported(source) if m.startswith("maxattn")}
        if source.module.startswith(FA4):
            outside = {m for m in ours if not m.startswith(allowed)}
            assert not outside, f"{source.path} imports {outside}"
        else:
            inside = {m for m in ours if m.startswith(f"{FA4}.")} - {f"{FA4}.kernel"}
            assert not inside, f"{source.path} imports {inside}: only kernel.py is imported"


# Tests of no folder of the package, or of a part of one.
NO_MIRROR = {"benchmarks", "examples", "fixtures", "fuzz", "gpu", "weights/families"}


def test_tests_mirror_the_package() -> None:
    folders = {str(f.parent.relative_to(ROOT / "tests")) for f in ROOT.glob("tests/*/**/test_*.py")}
    others = {x for x in folders if x not in NO_MIRROR and x.partition("/")[0] not in NO_MIRROR}
    assert not {x for x in others if not (PACKAGE / x / "__init__.py").exists()}
