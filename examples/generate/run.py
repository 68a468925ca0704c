"""A run of sampling: everything that can be wrong is said first, then weights are read, steps
taken, files written.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from samplers.read import Sampler
from train import hosts

from maxattn import weights
from maxattn.errors import InputError

from . import files, rows
from .checks import check
from .files import wrong
from .kind import Arrays, Kind
from .loop import denoise
from .paths import Paths


def generate(kind: Kind, paths: Paths, mesh: jax.sharding.Mesh | None = None) -> np.ndarray:
    """Draw samples; write latents, and what they show; return the latents, channels second.

    Args:
        kind: of the model.
        paths: of files and folders.
        mesh: devices to draw on; default the one there is.

    Raises:
        ConfigErrors: everything that is wrong with settings, sizes, files and folders, before a
        weight is read.
    """
    check(kind, paths)
    sampling = kind.settings.sampling
    sampler = kind.sampler()
    schedule = sampler.schedule(sampling.num_inference_steps)
    told, batch = _told(kind, paths, mesh)
    noise = _noise(paths, batch, kind)
    for line in _opening(kind, told, batch, sampler, mesh):
        print(line)
    model = load(kind, paths, mesh)
    began = time.perf_counter()
    arrays = tuple({name: rows.place(x, mesh) for name, x in part.items()} for part in told)
    x = denoise(kind, model, arrays, rows.place(np.moveaxis(noise, 1, -1), mesh), schedule)
    latents = np.moveaxis(hosts.whole(x), -1, 1)[: batch.wanted]
    print(f"{batch.wanted} samples in {time.perf_counter() - began:.1f} s")
    del model, x, arrays
    _check_finite(latents)
    if hosts.is_first():
        _write(kind, paths, latents)
    return latents


def load(kind: Kind, paths: Paths, mesh: jax.sharding.Mesh | None) -> nnx.Module:
    """Build the model and read its weights straight onto the mesh; merge LoRA weights, if there are
    any.
    """
    began = time.perf_counter()
    model = nnx.eval_shape(lambda: kind.build(mesh, nnx.Rngs(0)))
    prefix = _lora_prefix(paths.lora, kind) if paths.lora else ""
    if paths.lora is not None:
        weights.check_lora(model, paths.lora, prefix=prefix)
    weights.load_diffusers(model, paths.weights_of(kind.part), mesh=mesh)
    count = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    print(f"{count / 1e6:,.1f} million parameters read in {time.perf_counter() - began:.1f} s")
    if paths.lora is not None:
        changed = weights.merge_lora(model, paths.lora, paths.lora_scale, prefix=prefix)
        others = _passed_over(paths.lora, prefix)
        print(f"LoRA weights of {len(changed)} layers merged, times {paths.lora_scale:g}{others}")
    return model


# ---- the parts of a run --------------------------------------------------------------------------


def _told(kind: Kind, paths: Paths, mesh: Any) -> tuple[tuple[Arrays, ...], rows.Rows]:
    """Read or encode what the model is told, and arrange it in rows."""
    sampling = kind.settings.sampling
    if paths.embeddings is not None:
        arrays = files.read(paths.embeddings, "--embeddings")
    else:
        began = time.perf_counter()
        arrays = kind.encode(paths.model, paths.image)
        print(f"encoded on {sampling.torch_device} in {time.perf_counter() - began:.1f} s")
    guided = sampling.guidance_scale != 1
    if not guided:
        arrays = {name: x for name, x in arrays.items() if not name.startswith("negative_")}
    texts = max(len(x) for x in arrays.values())
    calls = 2 if guided and sampling.guidance_batched else 1
    batch = rows.Rows(texts, sampling.per_prompt, calls, rows.batch_ways(mesh))
    return rows.told_in_rows(kind.completed(arrays), batch, guided), batch


def _opening(
    kind: Kind, told: tuple[Arrays, ...], batch: rows.Rows, sampler: Sampler, mesh: Any
) -> Iterator[str]:
    """Say what will run."""
    sampling = kind.settings.sampling
    lengths = {name: told[0][name].shape[1] for name in ("text", "image") if name in told[0]}
    for plan in kind.plans(batch.samples * batch.calls, lengths, mesh).values():
        yield plan.explain()
    yield f"sampler   {sampler}, {sampling.num_inference_steps} steps"
    how = "one call of the model for both" if batch.calls == 2 else "one call after the other"
    yield (
        "guidance "
        f" {f'{sampling.guidance_scale:g}, {how}' if sampling.guidance_scale != 1 else 'none'}"
    )
    yield f"latents   {list(kind.latents)}"
    yield f"rows      {batch}"


def _noise(paths: Paths, batch: rows.Rows, kind: Kind) -> np.ndarray:
    if paths.noise is None:
        return rows.noise(kind.settings.sampling.seed, batch, kind.latents)
    given = files.read(paths.noise, "--noise")["noise"].astype(np.float32)
    if len(given) != batch.wanted:
        rule = f"one for each of the {batch.wanted} samples"
        raise wrong(
            "--noise",
            f"{paths.noise}: {len(given)} rows",
            rule,
            "set sampling.per_prompt, or make it anew",
        )
    return given[np.resize(np.arange(batch.wanted), batch.samples)]


def _lora_prefix(path: Path, kind: Kind) -> str:
    """Return what LoRA's names begin with, of the ways that diffusers and peft write them."""
    names = list(weights.SafeTensors(path))
    written = (
        prefix
        for prefix in (f"{kind.part}.", "base_model.model.")
        if any(n.startswith(prefix) for n in names)
    )
    return next(written, "")


def _passed_over(path: Path, prefix: str) -> str:
    others = [name for name in weights.SafeTensors(path) if not name.startswith(prefix)]
    return (
        f"; {len(others)} tensors for other parts than {prefix[:-1]} are not, such as {others[0]}"
        if others
        else ""
    )


def _check_finite(latents: np.ndarray) -> None:
    if not np.isfinite(latents).all():
        rule = "every number of the latents is finite"
        count = int((~np.isfinite(latents)).sum())
        raise InputError(
            "latents",
            f"{count} of {latents.size} are not",
            rule,
            "compute in bfloat16 or float32 (model.dtype), and look at the weights",
        )


def _write(kind: Kind, paths: Paths, latents: np.ndarray) -> None:
    if paths.latents is not None:
        print(
            files.write(
                paths.latents,
                {"latents": jnp.asarray(latents, jnp.float32).__array__()},
                str(paths.model),
            )
        )
    if paths.out is not None:
        began = time.perf_counter()
        for path in kind.decode(paths.model, latents, paths.out):
            print(path)
        print(
            f"decoded on {kind.settings.sampling.torch_device} in"
            f" {time.perf_counter() - began:.1f} s"
        )
