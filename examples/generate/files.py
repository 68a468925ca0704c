"""Embeddings in, latents out: safetensors files with arrays of known names, the batch first.

An embeddings file holds text [B, L, D]; for SDXL pooled [B, P], and time_ids [B, 6] where they are
not those of the size that is drawn; for image-to-video image [B, S, D] and condition [B, 4 + C, F,
h, w]; and negative_text (with negative_pooled), which guidance leads away from. A batch of 1 goes
with any other. A latents file holds latents [B, C, F, h, w] or [B, C, h, w] as the model sees them;
a noise file holds noise, as large.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from train.wrong import fits

from maxattn.config.errors import ConfigErrors
from maxattn.errors import ConfigError

from .kind import Arrays, Shapes

NAMES = ("text", "pooled", "time_ids", "image", "condition", "negative_text", "negative_pooled")
MAKE = "make it with examples/embed.py"
DRAW = "make it with examples/generate_wan.py or generate_sdxl.py, --latents FILE"
REMEDIES = {
    "latents": DRAW,
    "--noise": "give a safetensors file that holds noise",
}  # of other files


def shapes(path: Path, option: str, names: tuple[str, ...] = NAMES) -> dict[str, tuple[int, ...]]:
    """Read the shapes of a file's arrays, and nothing else.

    Args:
        path: of the file.
        option: the command's, for errors.
        names: that it may hold.

    Raises:
        ConfigErrors: it is no safetensors file, or holds other names.
    """
    file = _open(path, option)
    found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    if unknown := sorted(found.keys() - set(names)):
        raise ConfigErrors(
            [
                wrong(option, f"{path}: {name}", f"it holds {', '.join(names)}", _remedy(option))
                for name in unknown
            ]
        )
    return found


def read(path: Path, option: str) -> Arrays:
    """Read a file whole; bfloat16 stays bfloat16."""
    file = _open(path, option)
    return {name: np.asarray(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118


def write(path: Path, arrays: Mapping[str, np.ndarray], model: str) -> Path:
    """Write arrays, and which model they are for; the file takes its name when it is whole."""
    from safetensors.numpy import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.partial")
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    save_file(whole, beside, metadata={"model": model, "scaled": "true"})
    beside.replace(path)
    return path


def unlike(
    found: Shapes, expected: Mapping[str, tuple[Any, ...]], path: Path, option: str
) -> Iterator[ConfigError]:
    """Yield what a model lacks in a file, cannot take of it, or whose batches do not agree.

    Args:
        found: shapes, the batch first.
        expected: shapes without the batch, by name; "L" is any size.
        path, option: of the file, for errors.
    """
    for name, form in expected.items():
        text = f"{name} [B, {', '.join(map(str, form))}]"
        if name not in found:
            remedy = NO_GUIDANCE if name.startswith("negative_") else MAKE
            yield wrong(option, f"{path} without {name}", f"the model is told {text}", remedy)
        elif not fits(found[name][1:], form):
            yield wrong(
                option, f"{path}: {name} {list(found[name])}", f"the model takes {text}", SIZES
            )
    for name in sorted(
        found.keys() - expected.keys() - {"time_ids", "negative_text", "negative_pooled"}
    ):
        yield wrong(option, f"{path}: {name}", "this model is not told that", "leave it out")
    batches = {shape[0] for shape in found.values() if shape and shape[0] != 1}
    if len(batches) > 1:
        said = ", ".join(f"{name} {shape[0]}" for name, shape in found.items())
        yield wrong(option, f"{path}: {said}", "all arrays have one batch, or 1", MAKE)


NO_GUIDANCE = "make it with examples/embed.py --negative-prompt, or set sampling.guidance_scale=1"
SIZES = "make it for this model and this height, width and frames"


def wrong(option: str, value: object, rule: str, remedy: str) -> ConfigError:
    """Make the error of a command's option."""
    return ConfigError(option, value, rule, remedy)


def _open(path: Path, option: str) -> Any:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ConfigErrors(
            [wrong(option, path, "it names a file, and there is none", _remedy(option))]
        )
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise ConfigErrors(
            [wrong(option, path, f"a safetensors file is whole ({error})", _remedy(option))]
        ) from None


def _remedy(option: str) -> str:
    return REMEDIES.get(option, MAKE)
