"""A fa4-jax or cutlass-dsl with other operands than those tested is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

import maxattn as ma
from maxattn.errors import Unsupported
from maxattn.kernels.fa4 import library

PACKAGES = ("fa4-jax", "0.1.0"), ("nvidia-cutlass-dsl", "4.8.1")
CALL = ma.Call(1, 512, 512, 4, 4, 64, "bfloat16")
FLASH = ma.AttentionConfig(attention="flash")


def write(root: Path) -> None:
    """Write sources with all names of `library.USED`, and nothing else."""
    files: dict[str, list[str]] = {}
    for (file, where), names in library.USED.items():
        lines = files.setdefault(file, [])
        if not where:
            lines += [f"{name} = 0" for name in names]
            continue
        class_name, method = where.split(".")
        head = f"class {class_name}:"
        body = f"    def {method}(self, {', '.join(names)}): ..."
        if head in lines:
            lines.insert(lines.index(head) + 1, body)
        else:
            lines += [head, body]
    for file, lines in files.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_sources_with_all_names_fit(tmp_path: Path) -> None:
    write(tmp_path)
    assert library.mismatch_in(tmp_path) is None


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("cute/flash_fwd_sm90.py", "sO"),
        ("cute/flash_bwd_sm90.py", "mdQ_semaphore"),
        ("cute/tile_scheduler.py", "SingleTileScheduler"),
        ("kernels.py", "_bwd_post_params"),
    ],
)
def test_what_is_renamed_is_named(tmp_path: Path, file: str, name: str) -> None:
    write(tmp_path)
    path = tmp_path / file
    path.write_text(path.read_text(encoding="utf-8").replace(name, "renamed"), encoding="utf-8")
    assert name in (library.mismatch_in(tmp_path) or "")


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
