"""A file of measurements that another version wrote is copied, and no copy replaces another."""

from __future__ import annotations

from pathlib import Path

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
