"""The JSON of a saved reel: the rollout that made it, and how far the video is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from maxattn.errors import InputError

from .reel import Reel
from .rollout import Rollout

FORMAT, NAME = 1, "reel.json"
WRITE = "give a folder that `save` wrote"
NOTHING = type(None)
STAGES = ("empty", "filling", "full", "done", "complete")  # of a `KVCache`
# The kinds of values in the JSON file.
KINDS = {
    "format": (int,), "rollout": (dict,), "batch": (int,), "frame": (int,), "clean": (list,),
    "cache": (dict, NOTHING), "file": (str,),
}  # fmt: skip
OF_CACHE = {
    "slots": (int,), "dtype": (str,), "positions": (str,), "context": (str,), "own": (int,),
    "stage": (str,), "rows": (int,),
}  # fmt: skip


def said_of(run: Rollout, reel: Reel, file: str) -> dict[str, Any]:
    """Return the contents of the JSON file.

    Args:
        run: that makes the video.
        reel: where it is.
        file: that holds the arrays.
    """
    clean = [[first, *x.shape[1:2]] for first, x in reel.clean]
    said = {"format": FORMAT, "rollout": rollout_of(run), "batch": reel.batch, "frame": reel.frame}
    said |= {"clean": clean, "file": file}
    return said | {"cache": None if reel.cache is None else _of_cache(reel.cache)}


def _of_cache(cache: Any) -> dict[str, Any]:
    layout = cache.layout
    how = {"dtype": cache.dtype.name, "positions": layout.positions, "context": layout.context}
    at = {"own": cache.own, "stage": cache.stage, "rows": cache.frame.ndim}
    return {"slots": layout.frames, **how, **at}


def rollout_of(run: Rollout) -> dict[str, Any]:
    """Return the settings that the numbers of a rollout depend on beside its weights, for JSON."""
    own = {"stream": asdict(run.stream), "sides": run.sides, "seed": run.seed}
    own |= {"re_prefill": run.re_prefill, "time_scale": run.time_scale, "how": asdict(run.how)}
    return json.loads(json.dumps(own))


# ---- refusals ------------------------------------------------------------------------------------


def check_said(said: Mapping[str, Any], folder: Path) -> None:
    """Refuse a JSON file that lacks something, or holds more, or other kinds of values.

    Args:
        said: what it holds.
        folder: that it is in.
    """
    _check_kinds(said, KINDS, folder)
    if said["format"] != FORMAT:
        rule, remedy = f"files of format {FORMAT} are read here", "make the video anew"
        raise InputError("format", said["format"], rule, remedy)
    if said["cache"] is not None:
        _check_kinds(said["cache"], OF_CACHE, folder)
    pairs = all(type(x) is list and [*map(type, x)] == [int, int] for x in said["clean"])
    stage = None if said["cache"] is None else said["cache"]["stage"]
    if not pairs or stage not in (None, *STAGES) or Path(said["file"]).name != said["file"]:
        rule = "clean is pairs of numbers, stage a cache's, and file a name in the folder"
        raise InputError("reel", folder / NAME, rule, WRITE)


def _check_kinds(said: Mapping[str, Any], kinds: Mapping[str, Any], folder: Path) -> None:
    if odd := sorted(said.keys() ^ kinds.keys()):
        rule = f"the file contains {', '.join(kinds)}, each once, and nothing else"
        raise InputError("reel", f"{folder / NAME}: {', '.join(odd)}", rule, WRITE)
    for key, kind in kinds.items():
        if type(said[key]) not in kind:
            names = " or ".join("null" if one is NOTHING else one.__name__ for one in kind)
            rule, value = f"it is a value of {names}", f"{key} {said[key]!r}"
            raise InputError("reel", f"{folder / NAME}: {value}", rule, WRITE)


def check_run(held: Mapping[str, Any], run: Rollout) -> None:
    """Refuse a rollout that would go on with other numbers.

    Args:
        held: of the rollout that saved the reel.
        run: that is to go on.
    """
    own = rollout_of(run)
    for key in sorted(held.keys() | own.keys()):
        if (was := held.get(key)) != (is_ := own.get(key)):
            rule = f"a video goes on as it was begun, and this one was with {was}"
            remedy = "make the Rollout as the one that saved it, or begin a video"
            raise InputError(key, is_, rule, remedy)
