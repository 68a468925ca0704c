"""The inputs of a run: paths, safetensors files with arrays of known names, rows of the batch.

An embeddings file has text [B, L, D]; for SDXL and Flux.1 pooled [B, P]; for SDXL time_ids [B, 6]
if they differ from the sample's size; for image-to-video image [B, S, D] and condition
[B, 4 + C, F, h, w], or first [B, C, 1, h, w] for a model that continues an encoded image; and for
guidance negative_text (with negative_pooled). A batch of 1 is repeated for any other batch. A
latents file has scaled latents [B, C, F, h, w] or [B, C, h, w]; a noise file has noise of that
shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxattn import sharding
from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError
from maxattn.weights.replacing import replacing
from maxattn_examples.common.pipeline_folder import FIRST, SECOND, lacking, part_of
from maxattn_examples.common.shapes import Form, Shapes, fits

from .task import Arrays, SamplingTask

NAMES = ("text", "pooled", "time_ids", "image", "condition", "first")
NAMES = (*NAMES, "negative_text", "negative_pooled")
MAY_LACK = ("first",)  # conditions that a file may lack
OPTIONAL = ("time_ids", "negative_text", "negative_pooled")
MAKE = "make it with examples/embed.py"
DRAW = "make it with examples/generate.py, --latents FILE"
NO_GUIDANCE = (
    "make it with examples/embed.py --negative-prompt, or set sampling.guidance_scale=1"
    " (Flux.1: true_cfg_scale=1)"
)
SIZES = "make it for this model and this height, width and frames"
# Of files that are no embeddings.
REMEDIES = {"latents": DRAW, "--noise": "give a safetensors file of finite noise"}


@dataclass(frozen=True)
class Paths:
    """Paths of the files that a run reads and writes.

    Args:
        model: a pipeline's folder in diffusers' format, or a model's.
        weights: a folder whose weights are used instead of the model's, such as a training run's;
            it may have one of two transformers only.
        embeddings: the model's conditions; without it prompts are encoded with torch.
        image: the first frame for an image-to-video model, encoded with torch.
        noise: the initial noise, instead of noise from the seed.
        lora: weights to merge.
        lora_2: weights to merge into a pipeline's second transformer.
        lora_names: a YAML file that maps layer names of the LoRA to the model's.
        lora_scale: factor of LoRA weights; None is 1.
        lora_lenient: skip LoRA layers that do not fit the model.
        latents: the file for latents.
        out: the folder for decoded samples, which needs torch.
    """

    model: Path
    weights: Path | None = None
    embeddings: Path | None = None
    image: Path | None = None
    noise: Path | None = None
    lora: Path | None = None
    lora_2: Path | None = None
    lora_names: Path | None = None
    lora_scale: float | None = None
    lora_lenient: bool | None = None
    latents: Path | None = None
    out: Path | None = None

    def weights_of(self, part: str) -> Path:
        """Return the folder of a part's weights: a subfolder, or the folder itself."""
        instead = self.weights
        if instead is not None and lacking(instead, (FIRST, SECOND)) == [part]:
            instead = None  # it has the other transformer
        return part_of(instead or self.model, part)

    def lora_of(self, part: str) -> Path | None:
        """Return the path of a part's LoRA weights."""
        return self.lora_2 if part == SECOND else self.lora


def shapes(path: Path, option: str, names: tuple[str, ...] = NAMES) -> dict[str, tuple[int, ...]]:
    """Read only the shapes of a file's arrays.

    Args:
        option: the command-line option, for errors.
        names: the allowed names.

    Raises:
        ConfigErrors: the file is not safetensors, or has other names.
    """
    file, remedy = opened(path, option), REMEDIES.get(option, MAKE)
    found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    rule = f"the file contains {', '.join(names)}"
    if unknown := sorted(found.keys() - set(names)):
        raise ConfigErrors(ConfigError(option, f"{path}: {name}", rule, remedy) for name in unknown)
    return found


def read(path: Path, option: str) -> Arrays:
    """Read all arrays of a file; bfloat16 stays bfloat16.

    Raises:
        ConfigErrors: the file is not safetensors, or has numbers that are not finite in float32.
    """
    file = opened(path, option)
    found = {name: np.asarray(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    problems = []
    for name, array in found.items():
        with np.errstate(over="ignore"):
            wrong = array.size - int(np.isfinite(array.astype(np.float32, copy=False)).sum())
        if wrong:
            value, rule = f"{path}: {name}", f"its numbers are finite, and {wrong} of {array.size}"
            remedy = REMEDIES.get(option, MAKE)
            problems.append(ConfigError(option, value, f"{rule} are not", remedy))
    if problems:
        raise ConfigErrors(problems)
    return found


def write(path: Path, arrays: Mapping[str, np.ndarray], model: str, **more: str) -> Path:
    """Write arrays atomically; the metadata is the name of their model, and `more`."""
    from safetensors.numpy import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    with replacing(path) as partial:
        save_file(whole, partial, metadata={"model": model, "scaled": "true"} | more)
    return path


def shape_errors(
    found: Shapes, expected: Mapping[str, Form], path: Path, option: str
) -> Iterator[ConfigError]:
    """Yield an error for each array that a model lacks or cannot take, and for unequal batches.

    Args:
        found: shapes, batch first.
        expected: forms without the batch, by name.
        path, option: of the file, for errors.
    """
    for name, form in expected.items():
        if name in MAY_LACK and name not in found:
            continue
        yield from _array_errors(name, found.get(name), form, path, option)
    for name in sorted(found.keys() - expected.keys() - set(OPTIONAL)):
        rule = "this model does not take this array"
        yield ConfigError(option, f"{path}: {name}", rule, "leave it out")
    batches = {shape[0] for shape in found.values() if shape and shape[0] != 1}
    if len(batches) > 1:
        held = ", ".join(f"{name} {shape[0]}" for name, shape in found.items())
        yield ConfigError(option, f"{path}: {held}", "all arrays need one batch size, or 1", MAKE)


def _array_errors(
    name: str, shape: tuple[int, ...] | None, form: Form, path: Path, option: str
) -> Iterator[ConfigError]:
    text = f"{name} [B, {', '.join(map(str, form))}]"
    if shape is None:
        remedy = NO_GUIDANCE if name.startswith("negative_") else MAKE
        yield ConfigError(option, f"{path} without {name}", f"the model needs {text}", remedy)
    elif not fits(shape[1:], form):
        value, rule = f"{path}: {name} {list(shape)}", f"the model takes {text}"
        yield ConfigError(option, value, rule, SIZES)


def opened(path: Path, option: str, remedy: str | None = None) -> Any:
    """Open a safetensors file.

    Raises:
        ConfigErrors: it does not exist, or is damaged.
    """
    from safetensors import SafetensorError, safe_open

    remedy = remedy or REMEDIES.get(option, MAKE)
    if not path.is_file():
        rule = "the file does not exist"
        raise ConfigErrors([ConfigError(option, path, rule, remedy)])
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        rule = f"it must be complete safetensors ({error})"
        raise ConfigErrors([ConfigError(option, path, rule, remedy)]) from None


# ---- the rows of the batch -----------------------------------------------------------------------

TOKENS = {"text": 77, "image": 257}  # of CLIP; other encoders' are a setting


@dataclass(frozen=True)
class Rows:
    """The numbers of batch rows of a run.

    Args:
        texts: different prompts.
        count: samples of each prompt.
        calls: batch rows of the model per sample: 2 if both predictions are in one call.
        ways: devices that the batch is split over.
    """

    texts: int
    count: int
    calls: int
    ways: int

    @property
    def wanted(self) -> int:
        """The number of samples that the user wants."""
        return self.texts * self.count

    @property
    def samples(self) -> int:
        """The number of samples drawn; those beyond `wanted` only make the batch divide."""
        step = self.ways // math.gcd(self.ways, self.calls)
        return -(-self.wanted // step) * step

    def __str__(self) -> str:
        said = f"{self.wanted} samples in {self.calls * self.samples} rows of the model"
        if self.samples == self.wanted:
            return said
        filled = self.calls * (self.samples - self.wanted)
        devices = f"{filled} of them to fill up the {self.ways} devices of data and fsdp"
        instead = "ici_context_parallelism spreads one sample over several devices instead"
        return f"{said}, {devices}\n          {instead}"

    def spread(self, array: np.ndarray) -> np.ndarray:
        """Repeat an array's rows, one for each text or one for all, to one for each sample."""
        of_text = np.arange(self.texts) if len(array) == self.texts else np.zeros(self.texts, int)
        return array[np.resize(np.repeat(of_text, self.count), self.samples)]


def batch_ways(mesh: jax.sharding.Mesh | None) -> int:
    """Return the number of devices that a batch is split over."""
    return sharding.ways("B", sharding.mesh_shape(mesh))


def place(array: np.ndarray, mesh: jax.sharding.Mesh | None) -> jax.Array:
    """Put an array that every process has on the devices, batch split if it divides."""
    if mesh is None:
        return jnp.asarray(array)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    divides = array.shape[0] % batch_ways(mesh) == 0
    where = sharding.batch_sharding(mesh, array.ndim) if divides else whole
    return jax.make_array_from_callback(array.shape, where, lambda index: array[index])


def noise(seed: int, rows: Rows, shape: tuple[int, ...]) -> np.ndarray:
    """Draw standard normal noise; a row's noise depends only on the seed and its number.

    Args:

        shape: of one sample.
    """
    keys = (jax.random.fold_in(jax.random.key(seed), row) for row in range(rows.samples))
    return np.stack([np.asarray(jax.random.normal(key, shape)) for key in keys])


def told_in_rows(arrays: Arrays, rows: Rows, guided: bool) -> tuple[Arrays, ...]:
    """Arrange the model's conditions: one dict of arrays for each call of a step.

    Args:
        arrays: of an embeddings file.
        guided: whether the negative prompt's rows come before the prompt's.
    """
    spread = {name: rows.spread(array) for name, array in arrays.items()}
    negative = {name for name in spread if name.startswith("negative_")}
    meant = {name: array for name, array in spread.items() if name not in negative}
    if not guided:
        return (meant,)
    unmeant = meant | {name.removeprefix("negative_"): spread[name] for name in negative}
    if rows.calls == 1:
        return (unmeant, meant)
    return ({name: np.concatenate([unmeant[name], array]) for name, array in meant.items()},)


def assumed_lengths(task: SamplingTask) -> dict[str, int]:
    """Return the tokens of a prompt, and of an image if the model takes one."""
    text = getattr(task.settings.sampling, "text_tokens", TOKENS["text"])
    image = {"image": TOKENS["image"]} if "image" in task.expected(False) else {}
    return {"text": text} | image


def assumed(task: SamplingTask) -> Arrays:
    """Return zeros in the shapes of one encoded prompt."""
    lengths = assumed_lengths(task)
    forms = task.expected(task.settings.sampling.guided).items()

    def size(name: str, axis: int | str) -> int:
        return axis if isinstance(axis, int) else lengths[name.removeprefix("negative_")]

    shapes = {
        name: tuple(size(name, axis) for axis in form)
        for name, form in forms
        if name not in MAY_LACK
    }
    return {name: np.zeros((1, *shape), np.float32) for name, shape in shapes.items()}
