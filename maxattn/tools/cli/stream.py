"""--stream on a command line: a video model, and how it makes a video block by block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from maxattn.config.errors import plain
from maxattn.config.numbers import LARGEST, divisors, whole_in
from maxattn.errors import InputError, did_you_mean
from maxattn.sharding import MeshShape
from maxattn.streaming import Stream, checks
from maxattn.streaming.layout import CacheLayout
from maxattn.tools.stream_costs import StreamCosts
from maxattn.tools.video_models import MODELS, VideoModel

OPTION = "--stream"
SIZES = {
    "tokens": "tokens_per_frame",
    "heads": "heads",
    "head_dim": "head_dim",
    "layers": "layers",
    "kv_heads": "kv_heads",
}
NUMBERS = ("frames", "window", "sink", "steps", "length", *SIZES)
FLAGS = ("first_frame_alone", "clean_pass")
KEYS = (*NUMBERS, *FLAGS, "context")
EXAMPLE = "wan-1.3b-480p,frames=3,window=7"
ALL = "all"
# Keys of a file's section `rollout`, under our names.
_OF_SECTION = {
    "frames_per_block": "frames",
    "window": "window",
    "sink": "sink",
    "first_frame_alone": "first_frame_alone",
    "clean_pass": "clean_pass",
}
HELP = (
    f"a video made block by block, such as {EXAMPLE},sink=0: one of {', '.join(MODELS)}, or tokens="
    " (of a frame), heads=, head_dim= and layers= of another model, and: frames= of a block,"
    " window= in blocks, or all, sink= in frames, first_frame_alone, steps= of a block (default 4),"
    " clean_pass=false, length= of the video in frames, kv_heads=, context=heads or tokens;"
    " default what CONFIG's section rollout says"
)


def read_stream(
    text: str, sections: Mapping[str, Any], mesh: MeshShape, batch: int, dtype: str
) -> StreamCosts:
    """Read what `--stream` says.

    Args:
        text: `wan-1.3b-480p,frames=3,window=7,sink=0`.
        sections: of the file, whose `rollout` says what the text does not.
        mesh: that the cache lies on.
        batch: videos at a time.
        dtype: of q, k, v and the cache.

    Raises:
        InputError: a key, a value, or what they come to.
        MeshError: sizes do not divide over the mesh.
    """
    name, said = _words(text)
    said = _of_section(sections.get("rollout")) | said
    numbers = {key: _number(key, said[key]) for key in NUMBERS if key in said}
    flags = {key: _flag(key, said[key]) for key in FLAGS if key in said}
    model, length = _model(name, numbers), numbers.get("length")
    stream = _stream(model, numbers, flags.get("first_frame_alone", False))
    layout = CacheLayout(
        stream, _slots(stream, length), mesh=mesh, context=said.get("context", "heads")
    )
    how = batch, dtype, numbers.get("steps", 4), flags.get("clean_pass", True), length
    return StreamCosts(name or "own sizes", model, layout, *how)


def _words(text: str) -> tuple[str, dict[str, str]]:
    """Split `NAME,key=value,...` into the name, empty without one, and the values by key."""
    name, said = "", {}
    for place, word in enumerate(text.split(",", 2 * len(KEYS))):
        key, equals, value = (part.strip() for part in word.partition("="))
        if not equals and place == 0 and key not in FLAGS:
            name = key
            continue
        if key not in KEYS or not (equals or key in FLAGS):
            raise _unknown(word, key)
        if key in said:
            raise InputError(OPTION, plain(word), f"{key} is there twice", "leave one of them out")
        said[key] = value if equals else "true"
    if (name and name not in MODELS) or not (name or said):
        rule = f"it begins with one of {', '.join(MODELS)}, or says tokens=, heads=, ... of another"
        remedy = did_you_mean(name, MODELS) or f"write for example {EXAMPLE}"
        raise InputError(OPTION, plain(name) if name else "(nothing)", rule, remedy)
    return name, said


def _unknown(word: str, key: str) -> InputError:
    if key in KEYS:
        return InputError(OPTION, plain(word), f"{key} has a value", f"write {key}=VALUE")
    rule = f"its keys are {', '.join(KEYS)}"
    remedy = did_you_mean(key, KEYS) or f"write for example {EXAMPLE}"
    return InputError(OPTION, plain(word) if word else "(nothing)", rule, remedy)


def _of_section(section: Any) -> dict[str, str]:
    """Return what a file's `rollout` says, as it would be written here."""
    given = section if isinstance(section, Mapping) else {}
    said = {ours: str(given[key]) for key, ours in _OF_SECTION.items() if key in given}
    steps = given.get("denoising_steps")
    said |= {"steps": str(len(steps))} if isinstance(steps, list) else {}
    return {key: ALL if value == "None" else value.lower() for key, value in said.items()}


def _number(key: str, value: str) -> int:
    """Return a whole number; 0 is a window of all blocks."""
    if key == "window" and value == ALL:
        return 0
    least = 0 if key == "sink" else 1
    if (number := whole_in(value, least)) is not None:
        return number
    rule = f"it is a whole number from {least} to {LARGEST}"
    other = " or window=all" if key == "window" else ""
    raise InputError(f"{OPTION} {key}", plain(value), rule, f"write for example {key}=3{other}")


def _flag(key: str, value: str) -> bool:
    if value in ("true", "false"):
        return value == "true"
    raise InputError(f"{OPTION} {key}", plain(value), "it is true or false", f"write {key}=true")


def _model(name: str, numbers: Mapping[str, int]) -> VideoModel:
    """Return a named model with the sizes that are given, or one of these alone."""
    own = {field: numbers[key] for key, field in SIZES.items() if key in numbers}
    missing = [key for key in SIZES if key not in numbers and key != "kv_heads"]
    if not name and missing:
        rule = f"a model without a name has {', '.join(k for k in SIZES if k != 'kv_heads')}"
        remedy = f"add {missing[0]}=, or begin with one of {', '.join(MODELS)}"
        raise InputError(OPTION, f"no {', '.join(missing)}", rule, remedy)
    model = replace(MODELS[name], **own) if name else VideoModel("own sizes", frames=0, **own)
    if model.kv_heads and model.heads % model.kv_heads:
        rule = f"kv_heads divides heads, and {model.kv_heads} does not divide {model.heads}"
        choices = ", ".join(map(str, divisors(model.heads)))
        raise InputError(f"{OPTION} kv_heads", model.kv_heads, rule, f"give one of {choices}")
    return model


def _stream(model: VideoModel, numbers: Mapping[str, int], alone: bool) -> Stream:
    window, sink = numbers.get("window") or None, numbers.get("sink", 0)
    return Stream(model.tokens_per_frame, numbers.get("frames", 1), window, sink, alone)


def _slots(stream: Stream, length: int | None) -> int:
    """Count the slots of the cache: the frames of the window, else of the whole video."""
    if length is not None:
        stream.check_frames(f"{OPTION} length", length)
    if stream.window is None and length is None:
        rule = "without a window the cache keeps every frame of the video"
        raise InputError(OPTION, "no window, no length", rule, "add window=7, or length=21")
    return checks.slots(stream, length if stream.window is None else None)
