"""A file of measurements from another version is backed up; no backup replaces another."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from maxattn.config.measurements import read_kept
from maxattn.tools.tune.store import put_aside


def test_each_copy_has_a_name_of_its_own(tmp_path: Path) -> None:
    path, copies = tmp_path / "tuned.json", []
    for version in (101, 102, 101):
        text = f'{{"version": {version}, "measurements": []}}'
        path.write_text(text)
        found = put_aside(path)
        assert found is not None and found[1].read_text() == text
        copies.append(found[1].name)
    assert copies == ["tuned.damaged.json", "tuned.damaged-2.json", "tuned.damaged.json"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    from maxattn.tools.writable import write_whole

    there, link = tmp_path / "there.json", tmp_path / "tuned.json"
    there.write_text("old")
    link.symlink_to(there)
    write_whole(link, "new")
    assert link.is_symlink() and there.read_text() == "new"
    assert {f.name for f in tmp_path.iterdir()} == {"there.json", "tuned.json"}


def test_a_damaged_file_under_a_link_is_copied_beside_itself(tmp_path: Path) -> None:
    there, link = tmp_path / "there" / "file.json", tmp_path / "tuned.json"
    there.parent.mkdir()
    there.write_text("{")
    link.symlink_to(there)
    found = put_aside(link)
    assert found is not None and found[1].read_text() == "{"
    assert link.is_symlink() and found[1].parent == there.parent


def test_a_file_that_cannot_be_read_gives_place_and_its_link_stays() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        there, link = folder / "file.json", folder / "tuned.json"
        there.write_text("kept")
        link.symlink_to(there)
        (folder / "file.damaged.json").write_text("an earlier copy")
        there.chmod(0o200)
        is_root = os.geteuid() == 0  # root may read every file
        if is_root:
            for path in (folder, there):
                os.chown(path, 65534, 65534)
            os.seteuid(65534)
        try:
            found = put_aside(link)
            assert found is not None and "it cannot be read" in found[0]
            assert read_kept(link) == ([], "") and link.is_symlink()
        finally:
            if is_root:
                os.seteuid(0)
        found[1].chmod(0o600)
        assert found[1].read_text() == "kept"
