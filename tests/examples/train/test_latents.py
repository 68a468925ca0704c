"""A folder of latents: what is written is what is read, in a seeded order that resumes, and what is
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import make_latents
import ml_dtypes
import numpy as np
import pytest
from common.ink import from_latents, from_model
from digits import latents as digit_latents
from digits.settings import DataSettings
from digits.videos import DigitVideos
from safetensors.numpy import load_file, save_file
from train import shards
from train.data import batches
from train.latents import LatentFolder

from maxattn.errors import ConfigError
from tests.golden_text import check_golden

from .made import drawn, folder

SCALED = {"scaled": "true"}


def test_what_is_written_is_read_whatever_the_shards(tmp_path: Path):
    examples = drawn("i2v", 8)
    parts = [
        {name: array[i:j] for name, array in examples.items()} for i, j in ((0, 1), (1, 6), (6, 8))
    ]
    made = shards.write(tmp_path / "made", parts, per_shard=3)
    assert [len(load_file(path)["latents"]) for path in sorted(made.folder.glob("latents-*"))] == [
        3,
        3,
        2,
    ]
    assert len(made) == 8
    for i in range(8):
        for name, array in made[i].items():
            np.testing.assert_array_equal(array, examples[name][i])


def test_bfloat16_stays_what_it_is(tmp_path: Path):
    examples = {name: array.astype(ml_dtypes.bfloat16) for name, array in drawn("wan", 2).items()}
    made = shards.write(tmp_path / "made", [examples])
    assert made[1]["latents"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(made[1]["text"], examples["text"][1])


def test_the_order_is_the_seeds_and_goes_on_from_its_place(tmp_path: Path):
    source = LatentFolder(folder(tmp_path / "made", "wan", count=7))
    first, again, other = (
        batches(source, 2, seed=1),
        batches(source, 2, seed=1),
        batches(source, 2, seed=2),
    )
    some = batches(source, 2, seed=1, rows=np.array([1]))
    seen, others = [], []
    for _ in range(7):
        batch, part = next(first), next(some)
        seen.append(batch["latents"])
        others.append(next(other)["latents"])
        np.testing.assert_array_equal(
            part["latents"], batch["latents"][1:]
        )  # what a second process would load
    assert len({row.tobytes() for batch in seen for row in batch}) == 7, (
        "two epochs, each example in both"
    )
    assert not np.array_equal(np.stack(seen), np.stack(others))
    for _ in range(3):
        next(again)
    place, fresh = again.get_state(), batches(source, 2, seed=1)
    fresh.set_state(place)
    np.testing.assert_array_equal(next(fresh)["latents"], seen[3])


def test_the_empty_text_is_what_the_folder_says_or_zeros(tmp_path: Path):
    said = LatentFolder(folder(tmp_path / "said", "sdxl"))
    assert {name: float(array.mean()) for name, array in said.empty.items()} == {
        "text": 0.5,
        "pooled": 0.5,
    }
    assert said.note == ""
    silent = LatentFolder(folder(tmp_path / "silent", "sdxl", empty=False))
    assert {name: array.shape for name, array in silent.empty.items()} == {
        "text": (3, 6),
        "pooled": (5,),
    }
    assert not any(array.any() for array in silent.empty.values())
    assert "replaced by zeros" in silent.note


def test_data_is_told_apart_by_what_it_is_not_where(tmp_path: Path):
    one, same, more = (
        folder(tmp_path / name, "wan", count=n)
        for name, n in (("one", 4), ("same", 4), ("more", 5))
    )
    assert (
        LatentFolder(one).fingerprint
        == LatentFolder(same).fingerprint
        != LatentFolder(more).fingerprint
    )


@pytest.mark.parametrize("kind", ["wan", "i2v", "sdxl"])
def test_digits_come_back_out_of_their_latents(kind: digit_latents.Model, tmp_path: Path):

    make_latents.main(
        [str(tmp_path / "digits"), "--digits", kind, "--count", "3", "--text-dim", "8"]
    )
    made = LatentFolder(str(tmp_path / "digits"))
    assert (len(made), made.kind) == (3, "digits")
    videos = DigitVideos(DataSettings(frames=5, canvas=digit_latents.CANVAS, lane_spread=2))
    known = {
        from_model(videos[i]["video"]).tobytes()
        for i in np.random.default_rng(0).permutation(len(videos))[:3]
    }
    for i in range(3):
        latents = made[i]["latents"]
        ink = from_latents(latents if latents.ndim == 4 else latents[:, None])
        assert any(video[: ink.nbytes] == ink.tobytes() for video in known)
    assert made[0]["text"].shape == (4, 8)
    if kind == "i2v":
        condition = made[0]["condition"]
        np.testing.assert_array_equal(condition[4:, 0], made[0]["latents"][:, 0])
        assert condition[:4, 0].all() and not condition[:, 1:].any()


def test_files_become_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name, seed in (("a", 0), ("b", 1)):
        save_file(drawn("wan", 2, seed), tmp_path / f"{name}.safetensors")
    save_file({"negative_text": np.ones((1, 3, 6), np.float32)}, tmp_path / "empty.safetensors")
    files = [str(tmp_path / f"{name}.safetensors") for name in "ab"]
    how = ["--empty", str(tmp_path / "empty.safetensors"), "--model", "mine"]
    make_latents.main([str(tmp_path / "made"), "--from", *files, *how])
    made = LatentFolder(str(tmp_path / "made"))
    assert (len(made), made.model, made.has_empty) == (4, "mine", True)
    np.testing.assert_array_equal(made[2]["latents"], drawn("wan", 2, 1)["latents"][0])
    assert "4 examples" in capsys.readouterr().out


# ---- what is refused -----------------------------------------------------------------------------


def shard(
    path: Path, number: int = 0, metadata: dict[str, str] = SCALED, **arrays: np.ndarray
) -> None:
    path.mkdir(exist_ok=True)
    save_file(arrays, path / f"latents-{number:05}.safetensors", metadata=metadata)


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def nothing(path: Path) -> None:
    path.mkdir()


def not_whole(path: Path) -> None:
    shard(path, latents=zeros(2, 4, 2, 4, 4))
    whole = (path / "latents-00000.safetensors").read_bytes()
    (path / "latents-00000.safetensors").write_bytes(whole[:50])


def unlike_shards(path: Path) -> None:
    shard(path, latents=zeros(2, 4, 2, 4, 4), text=zeros(2, 3, 6))
    shard(path, 1, latents=zeros(2, 4, 2, 4, 6), text=zeros(2, 3, 6))
    shard(path, 2, latents=zeros(2, 4, 2, 4, 4))


def everything(path: Path) -> None:
    shard(
        path,
        metadata={},
        latents=zeros(2, 4, 2, 4, 4),
        text=zeros(3, 3, 6),
        prompt=np.zeros(2, np.int64),
    )


def other_empty(path: Path) -> None:
    shard(path, latents=zeros(2, 4, 2, 4, 4), text=zeros(2, 3, 6))
    save_file({"negative_text": zeros(1, 4, 6)}, path / "empty.safetensors")
    _ = LatentFolder(str(path)).empty


@pytest.mark.parametrize("make", [nothing, not_whole, unlike_shards, everything, other_empty])
def test_a_folder_that_is_not_right_is_refused(make: Callable[[Path], None], tmp_path: Path):
    with pytest.raises(ConfigError) as error:
        make(tmp_path / "data")
        LatentFolder(str(tmp_path / "data"))
    check_golden(f"training/folder_{make.__name__}", str(error.value).replace(str(tmp_path), "."))


def test_what_cannot_be_made_is_refused(tmp_path: Path):
    texts = []
    save_file(drawn("wan", 2), tmp_path / "a.safetensors")
    save_file(drawn("wan", 2, text=None), tmp_path / "b.safetensors")
    there, a, b = (str(tmp_path / name) for name in ("there", "a.safetensors", "b.safetensors"))
    Path(there).mkdir()
    for arguments in (
        [there, "--digits", "wan"],
        [there],
        [f"{there}/../a.safetensors/new", "--digits", "wan"],
        [
            there,
            "--from",
            f"{there}.safetensors",
            f"{there}-*.safetensors",
            "--empty",
            f"{there}.none",
        ],
        [f"{there}3", "--from", a, b],
    ):
        with pytest.raises(ConfigError) as error:
            make_latents.main(arguments)
        texts.append(str(error.value).replace(str(tmp_path), "."))
    check_golden("training/make_latents", "\n\n".join(texts))
    assert not (tmp_path / "there3").exists(), "half a folder has no name"
