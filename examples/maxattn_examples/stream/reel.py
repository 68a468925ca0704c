"""`Reel`, an unfinished video; `save` writes one to a folder, `load` continues it bit for bit.

    FOLDER/reel.json               the rollout that made it, and the frame reached
    FOLDER/reel-NAME.safetensors   cache, clean latents and condition

The JSON file names the other one and is written last, so a folder always has one whole reel.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

import maxattn as ma
from maxattn.errors import InputError
from maxattn.weights import SafeTensors
from maxattn.weights.replacing import locked, replacing
from maxattn_examples.common import hosts
from maxattn_examples.common.pipeline_folder import read_mapping, write_json

if TYPE_CHECKING:
    from .rollout import Rollout

Latents = Float[Array, "B F H W C"]

FORMAT, NAME = 1, "reel.json"
WRITE = "give a folder that `save` wrote"
NOTHING = type(None)
STAGES = ("empty", "filling", "full", "done", "complete")  # of a `KVCache`
# The types of values in the JSON file.
KINDS = {
    "format": (int,), "rollout": (dict,), "batch": (int,), "frame": (int,), "clean": (list,),
    "cache": (dict, NOTHING), "file": (str,),
}  # fmt: skip
OF_CACHE = {
    "slots": (int,), "dtype": (str,), "positions": (str,), "context": (str,), "own": (int,),
    "stage": (str,), "rows": (int,),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Reel:
    """The state from which the next block is sampled. It can be continued once.

    Args:
        told: the model's condition for every block from here on.
        batch: number of videos.
        frame: the number of the next frame.
        cache: keys and values of the frames in the window; None if each block recomputes its
            context.
        clean: (first frame, latents) of the blocks with a frame that a later block may need.
    """

    told: Any
    batch: int
    frame: int = 0
    cache: ma.KVCache | None = None
    clean: tuple[tuple[int, Latents], ...] = ()

    def with_clean(self, latents: Latents, kept: tuple[int, ...]) -> tuple[Any, ...]:
        """Return the clean blocks with one more, without those that are not needed any more.

        Args:
            latents: of the new block.
            kept: the frames that later blocks need.
        """
        blocks = (*self.clean, (self.frame, latents))
        return tuple(b for b in blocks if any(b[0] <= f < b[0] + b[1].shape[1] for f in kept))

    def frames(self, numbers: tuple[int, ...]) -> Latents:
        """Return the clean latents of these frames."""
        of_frame = {
            start + i: block[:, i] for start, block in self.clean for i in range(block.shape[1])
        }
        return jnp.stack([of_frame[f] for f in numbers], axis=1)


def save(run: Rollout, reel: Reel, folder: str | Path) -> Path:
    """Write a reel, in place of the folder's last one; return the JSON file.

    Args:
        run: the rollout that makes the video.
        reel: not continued yet.
        folder: is made if it does not exist.

    Raises:
        InputError: the reel was continued, so its cache was donated.
    """
    before = "a reel must be saved before its next block"
    check_unused(reel, before, "save what block() returned last")
    folder, file = Path(folder), f"reel-{secrets.token_hex(4)}.safetensors"
    arrays = {name: hosts.whole(x) for name, x in _arrays(reel).items()}
    if hosts.is_first():
        _write(folder, file, arrays, _saved(run, reel, file))
    return folder / NAME


def load(run: Rollout, folder: str | Path, like: Any) -> Reel:
    """Read a reel; its next block equals the one that the saved rollout would have made.

    Args:
        run: equal to the one that saved it in stream, sides, steps and seed; weights are not
            compared.
        folder: written by `save`.
        like: the model's condition, or its shapes, such as `jax.eval_shape` gives. The values come
            from the file; `run.switch` changes them.

    Raises:
        InputError: the rollout differs, or the file is incomplete or has other content.
        ConfigError: there is no JSON file, or it is not JSON.
        WeightsError: there is no file of arrays, or it is broken.
    """
    folder = Path(folder)
    saved = read_mapping(folder / NAME, "reel")
    _check_saved(saved, folder)
    _check_same(saved["rollout"], _settings_of(run))
    begun = _begun(run, saved, like)
    wanted = _arrays(begun)
    found = _read(folder / saved["file"], wanted)
    return _filled(begun, {name: _placed(found[name], x) for name, x in wanted.items()}, saved)


def check_unused(
    reel: Reel,
    what: str = "a reel can be continued once",
    remedy: str = "continue the reel that was returned last; `save` stores one",
) -> None:
    """Refuse a reel that was continued, so that its cache was donated.

    Args:
        what: the rule, for the error.
        remedy: for the error.
    """
    arrays = (x for x in jax.tree.leaves(reel.cache) if isinstance(x, jax.Array))
    # A traced array was not donated.
    if any(x.is_deleted() for x in arrays if not isinstance(x, Tracer)):
        rule = f"a cache is changed in place, so {what}"
        raise InputError("reel", f"frame {reel.frame}", rule, remedy)


# ---- writing -------------------------------------------------------------------------------------


def _arrays(reel: Reel) -> dict[str, Any]:
    """Name all arrays of a reel; keys and values are one array, or one per layer."""
    found = {f"told.{i}": x for i, x in enumerate(jax.tree.leaves(reel.told))}
    found |= {f"clean.{first}": x for first, x in reel.clean}
    if (cache := reel.cache) is None:
        return found
    for name in "kv":
        kept = getattr(cache, name)
        each = (
            {f"{name}.{i}": x for i, x in enumerate(kept)} if cache.is_per_layer else {name: kept}
        )
        found |= {f"cache.{key}": x for key, x in each.items()}
    return found | {"cache.frame": cache.frame, "cache.until": cache.until}


def _saved(run: Rollout, reel: Reel, file: str) -> dict[str, Any]:
    """Return the contents of the JSON file, which names the file of arrays."""
    clean = [[first, *x.shape[1:2]] for first, x in reel.clean]
    found = {"format": FORMAT, "rollout": _settings_of(run), "batch": reel.batch}
    found |= {"frame": reel.frame, "clean": clean, "file": file, "cache": None}
    if (cache := reel.cache) is not None:
        layout = cache.layout
        how = {"dtype": cache.dtype.name, "positions": layout.positions, "context": layout.context}
        at = {"own": cache.own, "stage": cache.stage, "rows": cache.frame.ndim}
        found["cache"] = {"slots": layout.frames, **how, **at}
    return found


def _settings_of(run: Rollout) -> dict[str, Any]:
    """Return the settings that a rollout's results depend on, without weights, for JSON."""
    own = {"stream": asdict(run.stream), "sides": run.sides, "seed": run.seed}
    own |= {"re_prefill": run.re_prefill, "time_scale": run.time_scale, "how": asdict(run.how)}
    return json.loads(json.dumps(own))


def _write(folder: Path, file: str, arrays: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        with replacing(folder / file) as beside:
            save_file({name: np.asarray(x, order="C") for name, x in arrays.items()}, beside)
        write_json(folder / NAME, saved)
        for earlier in folder.glob("reel-*.safetensors"):
            if earlier.name != file:
                earlier.unlink()


# ---- reading -------------------------------------------------------------------------------------


def _begun(run: Rollout, saved: Mapping[str, Any], like: Any) -> Reel:
    cache, shape = saved["cache"], (saved["batch"], *run.sides)
    how: dict[str, Any] = {}
    if cache is not None:
        how = {key: cache[key] for key in ("dtype", "positions", "context")}
        how |= {"frames": cache["slots"]} if run.stream.window is None else {}
    begun = run.begin(like, saved["batch"], **how)
    clean = (
        (first, jax.ShapeDtypeStruct((shape[0], frames, *shape[1:]), "float32"))
        for first, frames in saved["clean"]
    )
    if cache is not None and begun.cache is not None:
        rows, where = begun.cache.shape[1:2][: cache["rows"]], begun.cache.frame.sharding
        frame = jax.ShapeDtypeStruct(rows, "int32", sharding=where)
        begun = replace(begun, cache=replace(begun.cache, frame=frame, until=frame))
    return replace(begun, clean=tuple(clean))


def _read(path: Path, wanted: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Read arrays; refuse unexpected ones."""

    def form(x: Any) -> str:
        if x is None:
            return "not there"
        return f"{np.dtype(x.dtype).name}[{','.join(map(str, x.shape))}]"

    held = SafeTensors(path)
    for name in sorted(held.keys() | wanted.keys()):
        found, needed = (form(x.get(name)) for x in (held, wanted))
        if found != needed:
            rule = f"for this model and `like` it is {needed}"
            remedy = "pass the model and `like` with which the reel was saved"
            raise InputError("reel", f"{path.name}: {name} is {found}", rule, remedy)
    return {name: held[name][()] for name in wanted}


def _placed(x: np.ndarray, like: Any) -> jax.Array:
    """Put an array on the devices of the one it replaces."""
    where = None if isinstance(like, jax.Array) and not like.committed else like.sharding
    return jnp.asarray(x) if where is None else jax.device_put(x, where)


def _filled(begun: Reel, arrays: Mapping[str, jax.Array], saved: Mapping[str, Any]) -> Reel:
    leaves, tree = jax.tree.flatten(begun.told)
    told = jax.tree.unflatten(tree, [arrays[f"told.{i}"] for i in range(len(leaves))])
    clean = tuple((first, arrays[f"clean.{first}"]) for first, _ in begun.clean)
    reel = replace(begun, told=told, frame=saved["frame"], clean=clean)
    if begun.cache is None:
        return reel
    own = [name for name in _arrays(begun) if name.startswith("cache.")]  # as jax orders them
    tree = jax.tree.structure(begun.cache)
    cache = jax.tree.unflatten(tree, [arrays[name] for name in own])
    return replace(reel, cache=replace(cache, **{k: saved["cache"][k] for k in ("own", "stage")}))


# ---- refusals ------------------------------------------------------------------------------------


def _check_saved(saved: Mapping[str, Any], folder: Path) -> None:
    """Refuse a JSON file whose keys or types differ from `KINDS`."""
    _check_types(saved, KINDS, folder)
    if saved["format"] != FORMAT:
        rule, remedy = f"files of format {FORMAT} are read here", "make the video anew"
        raise InputError("format", saved["format"], rule, remedy)
    if saved["cache"] is not None:
        _check_types(saved["cache"], OF_CACHE, folder)
    pairs = all(type(x) is list and [*map(type, x)] == [int, int] for x in saved["clean"])
    stage = None if saved["cache"] is None else saved["cache"]["stage"]
    if not pairs or stage not in (None, *STAGES) or Path(saved["file"]).name != saved["file"]:
        rule = "clean is pairs of numbers, stage a cache's, and file a name in the folder"
        raise InputError("reel", folder / NAME, rule, WRITE)


def _check_types(saved: Mapping[str, Any], kinds: Mapping[str, Any], folder: Path) -> None:
    if odd := sorted(saved.keys() ^ kinds.keys()):
        rule = f"the file contains {', '.join(kinds)}, each once, and nothing else"
        raise InputError("reel", f"{folder / NAME}: {', '.join(odd)}", rule, WRITE)
    for key, kind in kinds.items():
        if type(saved[key]) not in kind:
            names = " or ".join("null" if one is NOTHING else one.__name__ for one in kind)
            rule, value = f"it is a value of {names}", f"{key} {saved[key]!r}"
            raise InputError("reel", f"{folder / NAME}: {value}", rule, WRITE)


def _check_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for key in sorted(before.keys() | now.keys()):
        if (was := before.get(key)) != (is_ := now.get(key)):
            rule = f"it must equal the saved rollout's, {was}"
            remedy = "make the Rollout as the one that saved it, or begin a video"
            raise InputError(key, is_, rule, remedy)
