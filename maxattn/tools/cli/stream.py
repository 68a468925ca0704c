"""Read --stream: a video model, and how it makes a video block by block."""

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
from maxattn.tools.cli.options import STREAM_EXAMPLE
from maxattn.tools.known_models import MODELS, VideoModel
from maxattn.tools.stream_costs import StreamCosts

OPTION = "--stream"
SIZES = {"tokens": "tokens_per_frame"}
SIZES |= {key: key for key in ("heads", "head_dim", "layers", "kv_heads")}
NUMBERS = ("frames", "window", "sink", "steps", "length", *SIZES)
FLAGS = ("first_frame_alone", "clean_pass")
KEYS = (*NUMBERS, *FLAGS, "context")
ALL = "all"
# Keys of a file's section `rollout`, under our names.
_OF_SECTION = {"frames_per_block": "frames"} | {key: key for key in ("window", "sink", *FLAGS)}


def read_stream(
    text: str, sections: Mapping[str, Any], mesh: MeshShape, batch: int, dtype: str
) -> StreamCosts:
    """Read the value of `--stream`; missing keys are taken from the section `rollout`."""
    name, given = _words(text)
    given = _of_section(sections.get("rollout")) | given
    numbers = {key: _number(key, given[key]) for key in NUMBERS if key in given}
    flags = {key: _flag(key, given[key]) for key in FLAGS if key in given}
    model, length = _model(name, numbers), numbers.get("length")
    window, sink = numbers.get("window") or None, numbers.get("sink", 0)
    alone = flags.get("first_frame_alone", False)
    stream = Stream(model.tokens_per_frame, numbers.get("frames", 1), window, sink, alone)
    slots = _slots(stream, length)
    layout = CacheLayout(stream, slots, mesh=mesh, context=given.get("context", "heads"))
    how = batch, dtype, numbers.get("steps", 4), flags.get("clean_pass", True), length
    return StreamCosts(name or "own sizes", model, layout, *how)


def _words(text: str) -> tuple[str, dict[str, str]]:
    """Split `NAME,key=value,...` into the name ("" if it is absent) and the values by key."""
    name, given = "", {}
    for place, word in enumerate(text.split(",", 2 * len(KEYS))):
        key, equals, value = (part.strip() for part in word.partition("="))
        if not equals and place == 0 and key not in FLAGS:
            name = key
            continue
        shown = plain(word) if word else "(nothing)"
        if key not in KEYS:
            rule = f"its keys are {', '.join(KEYS)}"
            remedy = did_you_mean(key, KEYS) or f"write for example {STREAM_EXAMPLE}"
            raise InputError(OPTION, shown, rule, remedy)
        if not equals and key not in FLAGS:
            raise InputError(OPTION, shown, f"{key} needs a value", f"write {key}=VALUE")
        if key in given:
            raise InputError(OPTION, shown, f"{key} is given twice", "leave one of them out")
        given[key] = value if equals else "true"
    if (name and name not in MODELS) or not (name or given):
        rule = f"it must begin with one of {', '.join(MODELS)}, or give tokens=, heads=, ..."
        remedy = did_you_mean(name, MODELS) or f"write for example {STREAM_EXAMPLE}"
        raise InputError(OPTION, plain(name) if name else "(nothing)", rule, remedy)
    return name, given


def _of_section(section: Any) -> dict[str, str]:
    found = section if isinstance(section, Mapping) else {}
    given = {ours: str(found[key]) for key, ours in _OF_SECTION.items() if key in found}
    steps = found.get("denoising_steps")
    given |= {"steps": str(len(steps))} if isinstance(steps, list) else {}
    return {key: ALL if value == "None" else value.lower() for key, value in given.items()}


def _number(key: str, value: str) -> int:
    """Read a whole number; window=all is read as 0."""
    if key == "window" and value == ALL:
        return 0
    least = 0 if key == "sink" else 1
    if (number := whole_in(value, least)) is not None:
        return number
    rule = f"it must be a whole number from {least} to {LARGEST}"
    other = " or window=all" if key == "window" else ""
    raise InputError(f"{OPTION} {key}", plain(value), rule, f"write for example {key}=3{other}")


def _flag(key: str, value: str) -> bool:
    if value in ("true", "false"):
        return value == "true"
    rule = "it must be true or false"
    raise InputError(f"{OPTION} {key}", plain(value), rule, f"write {key}=true")


def _model(name: str, numbers: Mapping[str, int]) -> VideoModel:
    own = {field: numbers[key] for key, field in SIZES.items() if key in numbers}
    needed = [key for key in SIZES if key != "kv_heads"]
    missing = [key for key in needed if key not in numbers]
    if not name and missing:
        rule = f"a model without a name needs {', '.join(needed)}"
        remedy = f"add {missing[0]}=, or begin with one of {', '.join(MODELS)}"
        raise InputError(OPTION, f"no {', '.join(missing)}", rule, remedy)
    model = replace(MODELS[name], **own) if name else VideoModel(frames=0, **own)
    if model.kv_heads and model.heads % model.kv_heads:
        rule = f"kv_heads must divide heads, and {model.kv_heads} does not divide {model.heads}"
        choices = ", ".join(map(str, divisors(model.heads)))
        raise InputError(f"{OPTION} kv_heads", model.kv_heads, rule, f"write one of {choices}")
    return model


def _slots(stream: Stream, length: int | None) -> int:
    if length is not None:
        stream.check_frames(f"{OPTION} length", length)
    if stream.window is None and length is None:
        rule = "without a window the cache keeps every frame of the video"
        raise InputError(OPTION, "no window, no length", rule, "add window=7, or length=21")
    return checks.slots(stream, length if stream.window is None else None)
