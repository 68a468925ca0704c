"""A reel on disk: a video that is being made is kept in a folder, and gone on from bit for bit.

    FOLDER/reel.json               the rollout that made it, and where the video is
    FOLDER/reel-NAME.safetensors   cache, clean latents, and what the model is told

The JSON file names the other one and is written last, so a folder holds one whole reel at any time.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxattn.errors import InputError
from maxattn.weights import SafeTensors
from maxattn_examples.common import hosts
from maxattn_examples.common.json_file import read_mapping, write_json
from maxattn_examples.common.replacing import only_writer, replacing

from . import checks
from .reel import Reel
from .reel_json import NAME, check_run, check_said, said_of
from .rollout import Rollout


def save(run: Rollout, reel: Reel, folder: str | Path) -> Path:
    """Write a reel in place of the one that a folder holds; return the JSON file.

    Args:
        run: the rollout that makes the video.
        reel: not gone on from yet.
        folder: made where it is missing.

    Raises:
        InputError: its cache is used up.
    """
    before = "a reel is saved before the next block is made of it"
    checks.used_up(reel, before, "save what block() returned last")
    folder, held = Path(folder), f"reel-{secrets.token_hex(4)}.safetensors"
    arrays = {name: hosts.whole(x) for name, x in _arrays(reel).items()}
    if hosts.is_first():
        _write(folder, held, arrays, said_of(run, reel, held))
    return folder / NAME


def load(run: Rollout, folder: str | Path, like: Any) -> Reel:
    """Read a reel; the next block of it is the one that would have followed.

    Args:
        run: as the one that saved it: stream, sides, steps and seed; the weights are not compared.
        folder: that `save` wrote.
        like: what the model is told, or shapes of it, such as `jax.eval_shape` gives. The values
            are those of the file; `run.switch` changes them.

    Raises:
        InputError: the rollout is another, or the file is not whole or holds something else.
        ConfigError: there is no JSON file, or it is none.
        WeightsError: there is no file of arrays, or it is broken.
    """
    folder = Path(folder)
    said = read_mapping(folder / NAME, "reel")
    check_said(said, folder)
    check_run(said["rollout"], run)
    begun = _begun(run, said, like)
    wanted = _arrays(begun)
    found = _read(folder / said["file"], wanted)
    return _filled(begun, {name: _placed(found[name], x) for name, x in wanted.items()}, said)


# ---- writing -------------------------------------------------------------------------------------


def _arrays(reel: Reel) -> dict[str, Any]:
    """Name all arrays of a reel."""
    found = {f"told.{i}": x for i, x in enumerate(jax.tree.leaves(reel.told))}
    found |= {f"clean.{first}": x for first, x in reel.clean}
    if reel.cache is None:
        return found
    cache = reel.cache
    kept = {f"cache.{name}": x for name in "kv" for name, x in _of_layers(name, cache)}
    return found | kept | {"cache.frame": cache.frame}


def _of_layers(name: str, cache: Any) -> list[tuple[str, Any]]:
    """Name the keys or values: one array, or one for each layer."""
    kept = getattr(cache, name)
    return (
        [(f"{name}.{i}", x) for i, x in enumerate(kept)] if cache.is_per_layer else [(name, kept)]
    )


def _write(folder: Path, held: str, arrays: Mapping[str, Any], said: Mapping[str, Any]) -> None:
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    with only_writer(folder):
        with replacing(folder / held) as beside:
            save_file({name: np.asarray(x, order="C") for name, x in arrays.items()}, beside)
        write_json(folder / NAME, said)
        for earlier in folder.glob("reel-*.safetensors"):
            if earlier.name != held:
                earlier.unlink()


# ---- reading -------------------------------------------------------------------------------------


def _begun(run: Rollout, said: Mapping[str, Any], like: Any) -> Reel:
    """Make a reel of the same shapes, which holds nothing."""
    cache, shape = said["cache"], (said["batch"], *run.sides)
    how: dict[str, Any] = {}
    if cache is not None:
        how = {key: cache[key] for key in ("dtype", "positions", "context")}
        how |= {"frames": cache["slots"]} if run.stream.window is None else {}
    begun = run.begin(like, said["batch"], **how)
    clean = (
        (first, jax.ShapeDtypeStruct((shape[0], frames, *shape[1:]), "float32"))
        for first, frames in said["clean"]
    )
    if cache is not None and begun.cache is not None:
        rows, lies = begun.cache.shape[1:2][: cache["rows"]], begun.cache.frame.sharding
        frame = jax.ShapeDtypeStruct(rows, "int32", sharding=lies)
        begun = replace(begun, cache=replace(begun.cache, frame=frame))
    return replace(begun, clean=tuple(clean))


def _read(path: Path, wanted: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Read arrays, and refuse others than those that are wanted."""
    held = SafeTensors(path)
    for name in sorted(held.keys() | wanted.keys()):
        found, form = (_form(x.get(name)) for x in (held, wanted))
        if found != form:
            rule = f"for this model and `like` it is {form}"
            remedy = "pass the model and `like` with which the reel was saved"
            raise InputError("reel", f"{path.name}: {name} is {found}", rule, remedy)
    return {name: held[name][()] for name in wanted}


def _form(x: Any) -> str:
    if x is None:
        return "not there"
    return f"{np.dtype(x.dtype).name}[{','.join(map(str, x.shape))}]"


def _placed(x: np.ndarray, like: Any) -> jax.Array:
    """Put an array where the one that it takes the place of lies."""
    lies = None if isinstance(like, jax.Array) and not like.committed else like.sharding
    return jnp.asarray(x) if lies is None else jax.device_put(x, lies)


def _filled(begun: Reel, arrays: Mapping[str, jax.Array], said: Mapping[str, Any]) -> Reel:
    leaves, tree = jax.tree.flatten(begun.told)
    told = jax.tree.unflatten(tree, [arrays[f"told.{i}"] for i in range(len(leaves))])
    clean = tuple((first, arrays[f"clean.{first}"]) for first, _ in begun.clean)
    reel = replace(begun, told=told, frame=said["frame"], clean=clean)
    if begun.cache is None:
        return reel
    tree = jax.tree.structure(begun.cache)
    own = [name for name in _arrays(begun) if name.startswith("cache.")]  # as jax orders them
    cache = jax.tree.unflatten(tree, [arrays[name] for name in own])
    at = {key: said["cache"][key] for key in ("own", "stage")}
    return replace(reel, cache=replace(cache, **at))
