"""A saved video continues bit for bit; files that do not fit are refused.

Messages: golden/reel.txt.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from maxattn_examples.stream import Denoising, Reel, Rollout, load, save
from safetensors.numpy import load_file, save_file

import maxattn as ma
from maxattn.errors import MaxattnError
from tests.examples.wan.streamed import SIDES, TOKENS, plain, small, text
from tests.golden_text import check_refused
from tests.waiting import but

HOW = Denoising((1000, 500))
STREAMS = {
    "sink": ma.Stream(TOKENS, 3, 3, sink=2),
    "every frame": ma.Stream(TOKENS, 3),
    "alone": ma.Stream(TOKENS, 3, 2, first_frame_alone=True),
}


def rollout(stream: ma.Stream = STREAMS["sink"], **how: Any) -> Rollout:
    return Rollout(how.pop("model", None) or plain(), stream, (*SIDES, 4), HOW, **how)


@cache
def usual(name: str = "sink") -> Rollout:
    """Make the rollout that tests share, so that they share its programs; it has no state."""
    return rollout(STREAMS[name])


def told(seed: int = 0) -> Any:
    return plain().encode(text(seed=seed))


def made(run: Rollout, reel: Reel, count: int) -> tuple[list[Any], Reel]:
    parts = []
    for x, after in run.blocks(reel, count):
        parts.append(np.asarray(x))
        reel = after
    return parts, reel


# A window that has rolled: the others have the same files.
GOES_ON = [("sink", 4), ("every frame", 0), ("alone", 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "blocks"), but(GOES_ON, GOES_ON[:1]))
def test_a_saved_video_goes_on_bit_for_bit(name: str, blocks: int, tmp_path: Path) -> None:
    stream, run = STREAMS[name], usual(name)
    frames = {} if stream.window else {"frames": 18}
    _, reel = made(run, run.begin(told(), **frames), blocks)
    save(run, run.begin(told(), **frames), tmp_path)
    save(run, reel, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2, "the files of the last reel alone"
    again = load(rollout(stream), tmp_path, jax.eval_shape(told))
    assert (again.frame, again.batch) == (reel.frame, reel.batch)
    if blocks:  # with another prompt too, which takes the clean latents
        again, reel = run.switch(again, told(1)), run.switch(reel, told(1))
    same(run, again, reel)


def same(run: Rollout, again: Reel, reel: Reel, blocks: int = 2) -> None:
    """Compare the blocks that continue two reels, bit for bit."""
    for got, want in zip(made(run, again, blocks)[0], made(run, reel, blocks)[0], strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_saved_block_goes_on(tmp_path: Path) -> None:
    run = usual()
    _, reel = made(run, run.begin(told()), 1)
    save(run, reel, tmp_path)
    same(run, load(run, tmp_path, jax.eval_shape(told)), reel, 1)


@pytest.mark.slow
@pytest.mark.parametrize("re_prefill", [False, True])
def test_two_videos_in_bfloat16(tmp_path: Path, re_prefill: bool) -> None:
    model = small(dtype=jnp.bfloat16, scan_layers=False)
    kv = model.encode(jnp.concatenate([text(seed=i) for i in (0, 1)]))
    run = rollout(model=model, re_prefill=re_prefill)
    _, reel = made(run, run.begin(kv, 2), 4)
    save(run, reel, tmp_path)
    again = load(run, tmp_path, kv)
    assert (again.cache is None) == re_prefill
    same(run, again, reel, 1)


@pytest.mark.slow
def test_a_cache_on_a_mesh_lies_as_it_did(tmp_path: Path) -> None:
    config = ma.AttentionConfig(ici_data_parallelism=1, ici_context_parallelism=2)
    mesh = config.make_mesh(jax.devices()[:2])
    run = rollout(model=small(mesh))
    _, reel = made(run, run.begin(told()), 3)
    save(run, reel, tmp_path)
    again = load(run, tmp_path, told())
    assert again.cache is not None and reel.cache is not None
    assert isinstance(again.cache.k, jax.Array) and isinstance(reel.cache.k, jax.Array)
    assert again.cache.k.sharding.is_equivalent_to(reel.cache.k.sharding, 5)
    same(run, again, reel)


# ---- refused files -----------------------------------------------------------------------------


def used_up(folder: Path) -> None:
    reel = usual().begin(told())
    usual().block(reel)
    save(usual(), reel, folder)


def said(**changes: Any) -> Callable[[Path], Any]:
    """Change keys of the JSON file; None removes a key."""

    def change(folder: Path) -> Any:
        path = folder / "reel.json"
        held = {k: x for k, x in (json.loads(path.read_text()) | changes).items() if x is not None}
        path.write_text(json.dumps(held))
        return load(rollout(), folder, told())

    return change


def no_json(folder: Path) -> Any:
    (folder / "reel.json").write_text("{")
    return load(rollout(), folder, told())


def of_cache(folder: Path) -> Any:
    held = json.loads((folder / "reel.json").read_text())["cache"]
    return said(cache=held | {"stage": "half"})(folder)


def arrays(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    """Change the file of arrays."""

    def changed(folder: Path) -> Any:
        held = load_file(path := next(folder.glob("*.safetensors")))
        change(held)
        save_file(held, path)
        return load(rollout(), folder, told())

    return changed


def cut(folder: Path) -> Any:
    path = next(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-8])
    return load(rollout(), folder, told())


def other(how: Denoising = HOW, **more: Any) -> Callable[[Path], Any]:
    def loaded(folder: Path) -> Any:
        run = rollout(**more)
        run.how = how
        return load(run, folder, told())

    return loaded


BAD: dict[str, Callable[[Path], Any]] = {
    "used_up": used_up,
    "no_folder": lambda folder: load(rollout(), Path("gone"), told()),
    "no_json": no_json,
    "more_keys": said(colour="red"),
    "fewer_keys": said(batch=None),
    "another_format": said(format=2),
    "a_batch_of_words": said(batch="one"),
    "a_file_elsewhere": said(file="../reel-1.safetensors"),
    "a_stage_of_no_cache": of_cache,
    "a_file_that_is_gone": said(file="reel-1.safetensors"),
    "a_file_that_is_cut": cut,
    "an_array_less": arrays(lambda held: held.pop("cache.v")),
    "an_array_more": arrays(lambda held: held.update(more=np.zeros(1, np.float32))),
    "keys_of_another_dtype": arrays(
        lambda held: held.update({"cache.k": held["cache.k"].astype(np.float16)})
    ),
    "told_of_another_structure": lambda folder: load(rollout(), folder, jnp.zeros((1, 3, 8))),
    "another_seed": other(seed=1),
    "another_stream": other(stream=ma.Stream(TOKENS, 3, 2)),
    "other_steps": other(replace(HOW, timestep_shift=3.0)),
    "no_cache_kept": other(re_prefill=True),
}


@pytest.mark.parametrize("name", BAD)
def test_files_that_do_not_fit_are_refused(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("maxattn_examples.stream.reel.secrets.token_hex", lambda _: "00000000")
    run, folder = usual(), Path("kept")
    save(run, run.block(run.begin(told()))[1], folder)
    check_refused(f"reel/{name}", MaxattnError, lambda: BAD[name](folder))
