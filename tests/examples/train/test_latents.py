"""Folders of latents: examples are read back exactly, in a seeded order that resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import make_latents
import ml_dtypes
import numpy as np
import pytest
from maxattn_examples.common.command import user_errors
from maxattn_examples.common.pictures import from_latents
from maxattn_examples.digits import latents as digit_latents
from maxattn_examples.digits import torus
from maxattn_examples.train.data import EMPTY, LatentFolder, batches, write
from safetensors.numpy import load_file, save_file

from maxattn.errors import ConfigError
from tests.golden_text import check_golden

from .made import drawn, folder


def test_written_examples_are_read_whatever_the_shards(tmp_path: Path) -> None:
    examples, ends = drawn("i2v", 8), ((0, 1), (1, 6), (6, 8))
    parts = [{name: array[i:j] for name, array in examples.items()} for i, j in ends]
    made = write(tmp_path / "made", parts, per_shard=3)
    files = sorted(made.folder.glob("latents-*"))
    assert [len(load_file(path)["latents"]) for path in files] == [3, 3, 2] and len(made) == 8
    for i in range(8):
        for name, array in made[i].items():
            np.testing.assert_array_equal(array, examples[name][i])


def test_a_folders_name_is_printed_escaped(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    save_file(drawn("wan", 2), tmp_path / "some.safetensors")
    with user_errors():
        make_latents.main(
            [str(tmp_path / "a\x1b[2Jb"), "--from", str(tmp_path / "some.safetensors")]
        )
    assert "2 examples in" in (said := capsys.readouterr().out) and "a\\u001b[2Jb" in said


def test_bfloat16_stays_bfloat16(tmp_path: Path) -> None:
    examples = {name: array.astype(ml_dtypes.bfloat16) for name, array in drawn("wan", 2).items()}
    made = write(tmp_path / "made", [examples])
    assert made[1]["latents"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(made[1]["text"], examples["text"][1])


def test_the_order_is_the_seeds_and_goes_on_from_its_place(tmp_path: Path) -> None:
    source = LatentFolder(folder(tmp_path / "made", "wan", count=7))
    first, again, other = (batches(source, 2, seed=seed) for seed in (1, 1, 2))
    some = batches(source, 2, seed=1, rows=np.array([1]))
    seen, others = [], []
    for _ in range(7):
        seen.append(next(first)["latents"])
        others.append(next(other)["latents"])
        # The rows that a second process would load.
        np.testing.assert_array_equal(next(some)["latents"], seen[-1][1:])
    assert len({row.tobytes() for batch in seen for row in batch}) == 7, "two whole epochs"
    assert not np.array_equal(np.stack(seen), np.stack(others))
    for _ in range(3):
        next(again)
    place, fresh = again.get_state(), batches(source, 2, seed=1)
    fresh.set_state(place)
    np.testing.assert_array_equal(next(fresh)["latents"], seen[3])


def test_the_empty_text_is_the_folder_s_or_zeros(tmp_path: Path) -> None:
    given, absent = (
        LatentFolder(folder(tmp_path / str(empty), "sdxl", empty=empty)) for empty in (True, False)
    )
    for source, value in ((given, 0.5), (absent, 0.0)):
        assert {n: x.shape for n, x in source.empty.items()} == {"text": (3, 6), "pooled": (5,)}
        assert all((x == value).all() for x in source.empty.values())
    assert given.note == "" and "replaced by zeros" in absent.note


def test_a_fingerprint_depends_on_the_examples_and_not_on_the_path(tmp_path: Path) -> None:
    counts = {"one": 4, "same": 4, "more": 5}
    folders = (folder(tmp_path / name, "wan", count=n) for name, n in counts.items())
    one, same, more = (LatentFolder(x).fingerprint for x in folders)
    assert one == same != more


@pytest.mark.parametrize("kind", ["wan", "i2v", "sdxl"])
def test_digits_come_back_out_of_their_latents(kind: digit_latents.Model, tmp_path: Path) -> None:
    path = str(tmp_path / "digits")
    make_latents.main([path, "--digits", kind, "--count", "3", "--text-dim", "8"])
    made = LatentFolder(path)
    assert (len(made), made.kind) == (3, "digits")
    known = {scan.tobytes() for scan in torus.load("train")[0]}
    for i in range(3):
        latents = made[i]["latents"]
        ink = from_latents(latents if latents.ndim == 4 else latents[:, None])
        rows, columns = (np.arange(8) + np.arange(16)[:, None]) % 16, np.arange(4, 12)
        cuts = [cut for r in rows for cut in (ink[0][r][:, columns], ink[0][columns][:, r])]
        assert any(cut.astype(np.uint8).tobytes() in known for cut in cuts), "one whole scan"
    assert made[0]["text"].shape == (2, 8)
    if kind == "i2v":
        condition = made[0]["condition"]
        np.testing.assert_array_equal(condition[4:, 0], made[0]["latents"][:, 0])
        assert condition[:4, 0].all() and not condition[:, 1:].any()


def test_files_become_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = {"a": drawn("wan", 2, 0), "b": drawn("wan", 2, 1)}
    arrays["empty"] = {"negative_text": np.ones((1, 3, 6), np.float32)}
    for name, tensors in arrays.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
    made, a, b, empty = (str(tmp_path / x) for x in ("made", *(f"{n}.safetensors" for n in arrays)))
    make_latents.main([made, "--from", a, b, "--empty", empty, "--model", "mine"])
    found = LatentFolder(made)
    assert (len(found), found.model, found.has_empty) == (4, "mine", True)
    np.testing.assert_array_equal(found[2]["latents"], arrays["b"]["latents"][0])
    assert "4 examples" in capsys.readouterr().out


# ---- refused folders -----------------------------------------------------------------------------


def shard(path: Path, number: int = 0, scaled: bool = True, **arrays: np.ndarray) -> None:
    path.mkdir(exist_ok=True)
    metadata = {"scaled": "true"} if scaled else {}
    save_file(arrays, path / f"latents-{number:05}.safetensors", metadata=metadata)


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


LATENTS, TEXT = zeros(2, 4, 2, 4, 4), zeros(2, 3, 6)


def not_whole(path: Path) -> None:
    shard(path, latents=LATENTS)
    whole = (path / "latents-00000.safetensors").read_bytes()
    (path / "latents-00000.safetensors").write_bytes(whole[:50])


def unlike_shards(path: Path) -> None:
    shard(path, latents=LATENTS, text=TEXT)
    shard(path, 1, latents=zeros(2, 4, 2, 4, 6), text=TEXT)
    shard(path, 2, latents=LATENTS)


def with_empty(empty: np.ndarray) -> Callable[[Path], None]:
    """Write a shard, and the empty text."""

    def make(path: Path) -> None:
        shard(path, latents=LATENTS, text=TEXT)
        save_file({"negative_text": empty}, path / EMPTY)

    return make


ONE, MORE = zeros(), {"text": zeros(3, 3, 6), "prompt": np.zeros(2, np.int64)}
WRONG: dict[str, Callable[[Path], None]] = {
    "nothing": Path.mkdir,
    "not_whole": not_whole,
    "unlike_shards": unlike_shards,
    "everything": lambda path: shard(path, scaled=False, latents=LATENTS, **MORE),
    "other_empty": with_empty(zeros(1, 4, 6)),
    # their messages have no golden text
    "a number": lambda path: shard(path, latents=ONE),
    "a text that is a number": lambda path: shard(path, latents=LATENTS, text=ONE),
    "no array": shard,
    "other rows": lambda path: shard(path, latents=LATENTS, text=TEXT[:1]),
    "an empty text that is a number": with_empty(ONE),
    "an empty text without a row": with_empty(TEXT[:0]),
    "an empty text of two rows": with_empty(TEXT),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_folder_is_refused(case: str, tmp_path: Path) -> None:
    WRONG[case](tmp_path / "data")
    with pytest.raises(ConfigError) as error:
        _ = LatentFolder(str(tmp_path / "data")).empty
    if " " not in case:
        check_golden(f"training/folder_{case}", str(error.value).replace(str(tmp_path), "."))


def test_folders_that_cannot_be_made_are_refused(tmp_path: Path) -> None:
    texts = []
    save_file(drawn("wan", 2), tmp_path / "a.safetensors")
    save_file(drawn("wan", 2, text=None), tmp_path / "b.safetensors")
    there, a, b = (str(tmp_path / name) for name in ("there", "a.safetensors", "b.safetensors"))
    Path(there).mkdir()
    gone = [f"{there}.safetensors", f"{there}-*.safetensors", "--empty", f"{there}.none"]
    for arguments in (
        [there, "--digits", "wan"],
        [there],
        [f"{there}/../a.safetensors/new", "--digits", "wan"],
        [there, "--from", *gone],
        [f"{there}3", "--from", a, b],
    ):
        with pytest.raises(ConfigError) as error:
            make_latents.main(arguments)
        texts.append(str(error.value).replace(str(tmp_path), "."))
    check_golden("training/make_latents", "\n\n".join(texts))
    assert not (tmp_path / "there3").exists(), "a folder appears only when it is whole"
