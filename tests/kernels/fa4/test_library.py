"""An fa4-jax or cutlass-dsl with other operands than the tested versions is refused by name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import maxattn as ma
from maxattn.errors import Unsupported
from maxattn.kernels.fa4 import library

PACKAGES = ("fa4-jax", "0.1.0"), ("nvidia-cutlass-dsl", "4.8.1")
CALL = ma.Call(1, 512, 512, 4, 4, 64, "bfloat16")
FLASH = ma.AttentionConfig(attention="flash")


def write(root: Path) -> None:
    """Write sources that have only the names in `library.USED`."""
    for file, places in library.USED.items():
        bodies: dict[str, list[str]] = {}
        for where, names in places.items():
            class_name, _, method = where.partition(".")
            lines = [f"{name}{': int' * bool(class_name)} = 0" for name in names.split()]
            operands = [f"def {method}(self, {', '.join(names.split())}): ..."]
            bodies.setdefault(class_name, []).extend(operands if method else lines)
        text = bodies.pop("", [])
        for name, body in bodies.items():
            text += [f"class {name}:", *(f"    {line}" for line in body)]
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text("\n".join(text) + "\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("kernels.py", ""),
        ("cute/flash_fwd_sm90.py", "sO"),
        ("cute/flash_bwd_sm90.py", "mdQ_semaphore"),
        ("cute/flash_bwd_sm90.py", "num_wg_dQ"),
        ("cute/tile_scheduler.py", "SingleTileScheduler"),
        ("kernels.py", "_bwd_post_params"),
    ],
)
def test_what_is_renamed_is_named_and_all_names_fit(tmp_path: Path, file: str, name: str) -> None:
    write(tmp_path)
    path = tmp_path / file
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(name, "renamed") if name else text, encoding="utf-8")
    found = library.mismatch_in(tmp_path)
    assert name in (found or "") and bool(found) == bool(name)


def test_other_operands_are_refused_and_auto_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found = "cute/flash_fwd_sm90.py has no FlashAttentionForwardSm90.mma"
    monkeypatch.setattr(library, "mismatch", lambda: found)
    target = ma.Target.named("NVIDIA H200", PACKAGES)
    with pytest.raises(Unsupported, match=r"mma") as refused:
        ma.plan(CALL, FLASH, None, target)
    assert "fa4-jax>=0.1,<0.2" in str(refused.value)
    assert ma.plan(CALL, ma.AttentionConfig(), None, target).kernel.name != "flash"


@pytest.mark.parametrize(
    ("package", "version"), [("fa4-jax", "0.2.0"), ("nvidia-cutlass-dsl", "4.9.0")]
)
def test_other_versions_are_refused(package: str, version: str) -> None:
    packages = tuple({**dict(PACKAGES), package: version}.items())
    target = ma.Target.named("NVIDIA H200", packages)
    with pytest.raises(Unsupported, match=version):
        ma.plan(CALL, FLASH, None, target)


def test_the_installed_fa4_jax_fits() -> None:
    assert library.mismatch() is None  # None too if it is not installed


# ---- every attribute that the kernels' files read is of maxattn, of cutlass, or in `USED` --------

FA4 = Path(library.__file__).parent
READERS = ("hopper.py", "scheduler.py", "mask_test.py")
# Attributes of cutlass-dsl's tensors, structs and work tiles, of which only the version is checked.
CUTLASS = {"iterator", "layout", "stride", "shape", "width", "get_slice", "partition_C", "inf"}
CUTLASS |= {"_annotations", "_offsets", "_tile_idx", "is_valid_tile", "launch"}
MODULES = ("cutlass", "cute", "arch", "jnp")
PYTHON = {name for kind in (dict, list, tuple, str, partial, object) for name in dir(kind)}
PYTHON |= {"_replace", "__dataclass_fields__", "__annotations__"}


def parsed(names: Any) -> Iterator[ast.AST]:
    return (node for x in names for node in ast.walk(ast.parse((FA4 / x).read_text("utf-8"))))


def root(node: Any) -> str:
    """Return the variable of an attribute chain, or the module that it imports."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "import_module":
            return ast.unparse(node.args[0]).strip("'")
        node = getattr(node, "value", None) or getattr(node, "func", None) or ast.Name("")
    return node.id


def attributes() -> dict[str, set[str]]:
    """Return the names read from `super()`, from the traced kernel, and from other objects."""
    found: dict[str, set[str]] = {"methods": set(), "kernel": set(), "others": set()}
    groups = {"super()": "methods", "self": "kernel", "kernel": "kernel"}
    for x in parsed(READERS):
        if isinstance(x, ast.Attribute) and not root(x).startswith(MODULES):
            found[groups.get(ast.unparse(x.value), "others")].add(x.attr)
    return found


def defined(names: Any, kinds: tuple[type, ...]) -> set[str]:
    nodes = (node for node in parsed(names) if isinstance(node, kinds))
    return {name for node in nodes for name in library._defined(node)}


def test_every_attribute_that_is_read_is_listed() -> None:
    places = [place for its in library.USED.values() for place in its.items()]
    listed = {x for where, names in places for x in (*where.split("."), *names.split())}
    kinds = ast.FunctionDef, ast.ClassDef, ast.AnnAssign
    ours = defined(["../kv_block.py", *(x.name for x in FA4.glob("*.py"))], (*kinds, ast.Assign))
    own = defined(READERS, kinds) | {"after_q", "kernel", "launcher", "blocks"}
    read = attributes()
    assert not read["methods"] - listed - PYTHON - {"__new_from_mlir_values__"}
    assert not read["kernel"] - own - listed - CUTLASS - PYTHON
    assert not read["others"] - ours - listed - CUTLASS - PYTHON
