"""Make a pipeline's folder of real size with random weights, or load one and save it back and
compare bit for bit.

    python examples/folder.py make /tmp/wan --model wan-2.1-t2v-1.3b --dtype bfloat16
    python examples/folder.py check /tmp/wan/transformer --save /tmp/again

A made folder is what the other commands take as --model, where nothing can be downloaded: their
samples are noise then. `check` says how much of the host's memory it took: tensors go to the
devices one by one, not a whole model at once. On a CPU the devices' memory is the host's, and the
model itself counts.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from sdxl.sizes import Sizes as UNetSizes
from sdxl.unet import UNet
from wan.model import WanTransformer3D
from wan.sizes import SIZES, Sizes

from maxattn import weights
from maxattn.errors import MaxattnError
from maxattn.weights.access import variable_at
from maxattn.weights.files import save_tensors
from maxattn.weights.safetensors_writer import Form

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
SPREAD = 0.02  # of random weights


def make(folder: Path, name: str, dtype: str, shard_bytes: int) -> tuple[Path, ...]:
    """Write a folder in diffusers' format: sizes, random weights in several files, the scheduler's
    options.

    Args:
        folder: made where it is missing.
        name: of the model.
        dtype: of the weights; norms and modulation tables are float32, as in diffusers.
        shard_bytes: the largest file.
    """
    sizes = UNetSizes() if name == "sdxl" else SIZES[name]
    part, scheduler = ("unet", EULER) if name == "sdxl" else ("transformer", UNIPC)
    model = shapes_of(sizes, dtype)
    every = {entry.name: entry for entry in weights.entries(model)}
    forms = {
        name: Form(entry.shape, variable_at(model, entry.path).get_value().dtype)
        for name, entry in every.items()
    }
    files = save_tensors(
        forms, lambda name: random(name, forms[name]), folder / part, shard_bytes=shard_bytes
    )
    write_json(folder / part / "config.json", sizes.config())
    write_json(folder / "scheduler" / "scheduler_config.json", scheduler)
    return files


def random(name: str, form: Form) -> np.ndarray:
    """Draw a tensor; its name is the seed. Scales of norms are near one."""
    drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(
        form.shape, np.float32
    ) * np.float32(SPREAD)
    return (drawn + 1 if "norm" in name and name.endswith("weight") else drawn).astype(form.dtype)


def shapes_of(sizes: Sizes | UNetSizes, dtype: Any) -> Any:
    """Build a model without arrays."""
    how: dict[str, Any] = {"dtype": jnp.dtype(dtype), "param_dtype": jnp.dtype(dtype)}
    kind: Any = UNet if isinstance(sizes, UNetSizes) else WanTransformer3D
    return nnx.eval_shape(lambda: kind(sizes, rngs=nnx.Rngs(0), **how))


def check(folder: Path, save: Path, dtype: str, shard_bytes: int) -> dict[str, Any]:
    """Load a folder, save it back, and compare every tensor.

    Returns:
        What was seen: tensors, those that differ, bytes, seconds, and the host's memory above what
        it was before.
    """
    said = json.loads((folder / "config.json").read_text())
    sizes = (UNetSizes if said.get("_class_name") == "UNet2DConditionModel" else Sizes).of_folder(
        folder
    )
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
    """List the tensors of two folders that are not the same bits under the same names."""
    a, b = weights.SafeTensors(one), weights.SafeTensors(other)
    both = [name for name in a if name in b]
    unequal = [name for name in both if not same_bits(a[name][()], b[name][()])]
    return sorted(unequal + list(set(a) ^ set(b)))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Compare dtype, shape and bits."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@contextmanager
def host_memory() -> Iterator[dict[str, int]]:
    """Watch this process's own memory, without pages of files, and say its peak above where it
    began, in bytes.
    """
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
    """Read how much memory this process holds that is no page of a file."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("RssAnon")
    )
    return int(line.split()[1]) * 1024


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a file of options."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2) + "\n")


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("what", choices=("make", "check"))
    p.add_argument("folder", type=Path)
    p.add_argument("--model", choices=(*SIZES, "sdxl"), default="wan-2.1-t2v-1.3b", help="for make")
    p.add_argument("--save", type=Path, help="for check: where to save it back")
    p.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="float32",
        help="of the weights; default float32",
    )
    p.add_argument("--shard-gib", type=float, default=5.0, help="the largest file; default 5")
    return p


def main(said: argparse.Namespace) -> None:
    """Make or check."""
    shard = int(said.shard_gib * 2**30)
    if said.what == "make":
        print("\n".join(map(str, make(said.folder, said.model, said.dtype, shard))))
        return
    if said.save is None:
        sys.exit("error: check needs --save FOLDER")
    seen = check(said.folder, said.save, said.dtype, shard)
    print(json.dumps(seen))
    sys.exit(
        f"{len(seen['different'])} tensors differ: {seen['different'][:5]}"
        if seen["different"]
        else None
    )


if __name__ == "__main__":
    try:
        main(parser().parse_args())
    except MaxattnError as error:
        sys.exit(f"error: {error}")
