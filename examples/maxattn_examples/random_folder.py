"""Write pipelines' folders with random weights; check that a folder is saved back bit for bit."""

from __future__ import annotations

import math
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxattn import weights
from maxattn.weights.replacing import replacing
from maxattn_examples.common.pipeline_folder import SECOND, read_mapping, write_json
from maxattn_examples.flux.model import FluxTransformer2D
from maxattn_examples.flux.settings import SIZES as FLUX_SIZES
from maxattn_examples.flux.settings import Sizes as FluxSizes
from maxattn_examples.sdxl.settings import Sizes as UNetSizes
from maxattn_examples.sdxl.unet import UNet
from maxattn_examples.wan.model import WanTransformer3D
from maxattn_examples.wan.settings import BOUNDARIES, CLASS_NAME, SIZES, Sizes

UNIPC = {
    "_class_name": "UniPCMultistepScheduler",
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "flow_shift": 3.0,
    "num_train_timesteps": 1000,
    "solver_order": 2,
    "solver_type": "bh2",
}
EULER = {
    "_class_name": "EulerDiscreteScheduler",
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "num_train_timesteps": 1000,
    "prediction_type": "epsilon",
    "steps_offset": 1,
    "timestep_spacing": "leading",
}
# What the pipelines of Wan 2.2 say of themselves.
INDEX = {"wan-2.2-ti2v-5b": {"_class_name": "WanPipeline", "expand_timesteps": True}} | {
    name: {
        "_class_name": "WanImageToVideoPipeline" if "i2v" in name else "WanPipeline",
        "boundary_ratio": at,
        SECOND: ["diffusers", CLASS_NAME],
    }
    for name, at in BOUNDARIES.items()
}
FLOW_EULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 4096,
    "max_shift": 1.15,
    "num_train_timesteps": 1000,
}
# FLUX.1-dev's times are shifted by the size of the picture, schnell's are not.
FLUX_SHIFTS = {
    "flux.1-dev": {"shift": 3.0, "use_dynamic_shifting": True},
    "flux.1-schnell": {"shift": 1.0, "use_dynamic_shifting": False},
}
SPREAD = 0.02  # of random weights
NAME = "diffusion_pytorch_model"
KINDS = {Sizes: WanTransformer3D, UNetSizes: UNet, FluxSizes: FluxTransformer2D}
CLASSES = {"UNet2DConditionModel": UNetSizes, "FluxTransformer2DModel": FluxSizes}


class Form(NamedTuple):
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def bytes(self) -> int:
        """The tensor's size in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def make(
    folder: Path, name: str, dtype: str, shard_bytes: int, layers: int | None = None
) -> tuple[Path, ...]:
    """Write a folder in diffusers' format: sizes, random weights, the scheduler's options.

    Args:
        folder: is made if it does not exist.
        name: of the model.
        dtype: of the weights; norms and modulation tables are float32, as in diffusers.
        shard_bytes: the largest size of a file.
        layers: number of a Wan transformer's layers; default all.
    """
    sizes = UNetSizes() if name == "sdxl" else {**SIZES, **FLUX_SIZES}[name]
    if layers is not None and isinstance(sizes, Sizes):
        sizes = replace(sizes, num_layers=layers)
    parts, scheduler = (("unet",), EULER) if name == "sdxl" else (("transformer",), UNIPC)
    if isinstance(sizes, FluxSizes):
        scheduler = FLOW_EULER | FLUX_SHIFTS[name]
    index = INDEX.get(name, {})
    parts += (SECOND,) if SECOND in index else ()
    forms, files = forms_of(shapes_of(sizes, dtype)), ()
    for part in parts:
        files += save_random(forms, folder / part, shard_bytes, part)
        write_json(folder / part / "config.json", sizes.config())
    write_json(folder / "scheduler" / "scheduler_config.json", scheduler)
    if index:
        write_json(folder / "model_index.json", index)
    return files


def forms_of(model: nnx.Module) -> dict[str, Form]:
    """Return the shape and dtype of each of diffusers' tensors for a model, by name."""
    variables = dict(nnx.to_flat_state(nnx.state(model)))
    entries = weights.entries(model)
    return {e.name: Form(e.shape, variables[e.path].get_value().dtype) for e in entries}


def save_random(
    forms: dict[str, Form], folder: Path, shard_bytes: int, part: str = ""
) -> tuple[Path, ...]:
    """Write random tensors to one file, or one by one to several files with an index.

    Args:
        folder: is made if it does not exist.
        shard_bytes: the largest size of a file.
        part: of the pipeline; the second transformer gets other numbers than the first.
    """
    seed = f"{part}." if part == SECOND else ""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    shards = list(shards_of(forms, shard_bytes))
    where: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"{NAME}-{i + 1:05}-of-{len(shards):05}" if len(shards) > 1 else NAME
        where |= dict.fromkeys(names, f"{file}.safetensors")
        tensors = {name: random(seed + name, forms[name]) for name in names}
        with replacing(folder / f"{file}.safetensors") as beside:
            save_file(tensors, beside, metadata={"format": "pt"})
    files = [folder / file for file in dict.fromkeys(where.values())]
    if len(shards) > 1:
        total = sum(form.bytes for form in forms.values())
        files.append(folder / f"{NAME}.safetensors.index.json")
        write_json(files[-1], {"metadata": {"total_size": total}, "weight_map": where})
    return tuple(files)


def shards_of(forms: dict[str, Form], shard_bytes: int) -> Iterator[list[str]]:
    """Group tensors, in their order, into files of at most `shard_bytes`."""
    names: list[str] = []
    held = 0
    for name, form in forms.items():
        if names and held + form.bytes > shard_bytes:
            yield names
            names, held = [], 0
        names.append(name)
        held += form.bytes
    yield names


def random(name: str, form: Form) -> np.ndarray:
    """Draw a tensor, seeded by its name; scales of norms are near one."""
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    drawn = generator.standard_normal(form.shape, np.float32) * np.float32(SPREAD)
    return (drawn + 1 if "norm" in name and name.endswith("weight") else drawn).astype(form.dtype)


def shapes_of(sizes: Any, dtype: Any) -> Any:
    """Build a model that has shapes but no arrays."""
    how: dict[str, Any] = {"dtype": jnp.dtype(dtype), "param_dtype": jnp.dtype(dtype)}
    kind: Any = next(kind for of, kind in KINDS.items() if isinstance(sizes, of))
    return nnx.eval_shape(lambda: kind(sizes, rngs=nnx.Rngs(0), **how))


def check(folder: Path, save: Path, dtype: str, shard_bytes: int) -> dict[str, Any]:
    """Load a folder, save it back, and compare every tensor.

    Returns:
        Counts of tensors and of those that differ, bytes, seconds, and the peak of the host's
        memory above the start.
    """
    config = read_mapping(folder / "config.json")
    kind: Any = CLASSES.get(config.get("_class_name", ""), Sizes)
    sizes = kind.of_folder(folder)
    model = shapes_of(sizes, dtype)
    with host_memory() as loading:
        began = time.perf_counter()
        weights.load_diffusers(model, folder)
        jax.block_until_ready(jax.tree.leaves(nnx.state(model)))
        loaded = time.perf_counter() - began
    with host_memory() as saving:
        files = weights.save_diffusers(model, save, shard_bytes)
        saved = time.perf_counter() - began - loaded
    params = [np.dtype(x.dtype).itemsize * x.size for x in jax.tree.leaves(nnx.state(model))]
    return {
        "tensors": len(weights.SafeTensors(folder)),
        "different": different(folder, save),
        "files": len(files),
        "bytes": sum(params),
        "largest": max(params),
        "load_s": loaded,
        "save_s": saved,
        "load_peak": loading["peak"],
        "save_peak": saving["peak"],
    }


def different(one: Path, other: Path) -> list[str]:
    """List the tensors whose bits differ between two folders, or that only one has."""
    a, b = weights.SafeTensors(one), weights.SafeTensors(other)
    both = [name for name in a if name in b]
    unequal = [name for name in both if not same_bits(a[name][()], b[name][()])]
    return sorted(unequal + list(set(a) ^ set(b)))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Compare dtype, shape and bits."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@contextmanager
def host_memory() -> Iterator[dict[str, int]]:
    """Measure the peak of this process's memory above the start, without pages of files."""
    seen, done = {"peak": 0}, threading.Event()
    first = own_bytes()

    def watch() -> None:
        while not done.wait(0.005):
            seen["peak"] = max(seen["peak"], own_bytes() - first)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


def own_bytes() -> int:
    """Return how many bytes of memory this process holds, without pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024
