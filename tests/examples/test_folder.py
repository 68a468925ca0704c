"""Folders of random weights load and save back bit for bit; the real size in bounded host
memory.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

import folder
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flux.sizes import Sizes as FluxSizes
from safetensors.numpy import load_file, save_file
from sdxl.sizes import Sizes as UNetSizes
from sdxl.unet import UNet
from wan.model import WanTransformer3D
from wan.sizes import SIZES, Sizes

from maxattn import weights
from tests.closeness import hold
from tests.fixtures import make_diffusers as made

from .conftest import ROOT


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(folder, "SIZES", {"small": Sizes(**made.MODEL)})
    files = folder.make(tmp_path / "made", "small", "bfloat16", 4000)
    assert len(files) > 3
    return tmp_path / "made" / "transformer"


def test_a_made_folder_saves_back_bit_for_bit(small: Path, tmp_path: Path) -> None:
    seen = folder.check(small, tmp_path / "again", "bfloat16", 6000)
    assert seen["different"] == [] and seen["tensors"] == len(weights.SafeTensors(small))


def test_a_made_folder_of_flux_saves_back_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "FLUX_SIZES", {"flux.1-schnell": FluxSizes(**made.SCHNELL)})
    files = folder.make(tmp_path / "made", "flux.1-schnell", "bfloat16", 8000)
    assert len(files) > 3
    whole = tmp_path / "made" / "transformer"
    seen = folder.check(whole, tmp_path / "again", "bfloat16", 2**30)
    assert seen["different"] == [] and seen["tensors"] == len(weights.SafeTensors(whole))
    again = weights.SafeTensors(tmp_path / "again")
    assert {again[name][()].dtype for name in again} == {np.dtype("bfloat16")}


def test_the_folders_of_wan_2_2_say_which_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {name: Sizes(**made.MODEL) for name in ("wan-2.2-t2v-a14b", "wan-2.2-ti2v-5b")}
    monkeypatch.setattr(folder, "SIZES", sizes)
    for name in sizes:
        folder.make(tmp_path / name, name, "bfloat16", 2**30)
    two, one = (json.loads((tmp_path / name / "model_index.json").read_text()) for name in sizes)
    assert two["boundary_ratio"] == 0.875 and one["expand_timesteps"]
    parts = [tmp_path / "wan-2.2-t2v-a14b" / part for part in ("transformer", "transformer_2")]
    assert len(folder.different(*parts)) > 20, "two experts"
    assert not (tmp_path / "wan-2.2-ti2v-5b" / "transformer_2").exists()


def test_one_flipped_bit_is_found(small: Path, tmp_path: Path) -> None:
    folder.check(small, tmp_path / "again", "bfloat16", 2**30)
    path = tmp_path / "again" / "diffusion_pytorch_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert len(folder.different(small, tmp_path / "again")) == 1


def test_random_tensors_have_their_own_seeds() -> None:
    form = folder.Form((64,), np.dtype("float32"))
    one, other, scale = (
        folder.random(name, form) for name in ("a.weight", "b.weight", "norm_q.weight")
    )
    assert (one != other).all() and abs(scale.mean() - 1) < 0.1
    np.testing.assert_array_equal(one, folder.random("a.weight", form))


@pytest.mark.parametrize(
    ("name", "part"), [("small", "transformer"), ("sdxl", "unet"), ("flux.1-dev", "transformer")]
)
def test_diffusers_reads_what_is_made(
    name: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diffusers_or_skip()
    import diffusers

    monkeypatch.setattr(folder, "SIZES", {"small": Sizes(**made.MODEL)})
    monkeypatch.setattr(folder, "FLUX_SIZES", {"flux.1-dev": FluxSizes(**made.FLUX)})
    small_unet = type(
        "SmallUNet", (UNetSizes,), {"__init__": lambda self: UNetSizes.__init__(self, **made.UNET)}
    )
    monkeypatch.setattr(folder, "UNetSizes", small_unet)
    folder.make(tmp_path, name, "float32", 100_000)
    kind = getattr(
        diffusers, json.loads((tmp_path / part / "config.json").read_text())["_class_name"]
    )
    theirs = kind.from_pretrained(tmp_path / part)
    held = weights.SafeTensors(tmp_path / part)
    assert set(theirs.state_dict()) == set(held)
    for key, value in theirs.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), held[key][()], err_msg=key)
    known = inspect.signature(kind.__init__).parameters.keys()
    assert json.loads((tmp_path / part / "config.json").read_text()).keys() - known == {
        "_class_name"
    }
    scheduler = json.loads((tmp_path / "scheduler" / "scheduler_config.json").read_text())
    options = (
        getattr(diffusers, scheduler.pop("_class_name"))
        .from_pretrained(tmp_path / "scheduler")
        .config
    )
    assert {key: options[key] for key in scheduler} == scheduler


def diffusers_or_skip() -> None:
    for package in ("torch", "diffusers", "accelerate"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


# ---- the real size: 3 GB on disk, and as much again for a moment; at most about 9 GB of memory ---

SIZE = ("--dtype", "bfloat16", "--shard-gib", "1")
COMMAND = [sys.executable, str(ROOT / "examples" / "folder.py")]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Make Wan 2.1 1.3B of random weights; it is deleted afterwards."""
    yield from made_and_deleted(tmp_path_factory.mktemp("real"), "wan-2.1-t2v-1.3b")


@pytest.fixture
def real_sdxl(tmp_path: Path) -> Iterator[Path]:
    """Make SDXL base of random weights; it is deleted afterwards."""
    diffusers_or_skip()
    yield from made_and_deleted(tmp_path / "sdxl", "sdxl")


def made_and_deleted(path: Path, name: str) -> Iterator[Path]:
    subprocess.run([*COMMAND, "make", str(path), "--model", name, *SIZE], check=True)
    yield path
    shutil.rmtree(path)


@pytest.mark.slow
def test_wan_1_3b_loads_and_saves_with_one_parameter_more_than_the_model_in_memory(
    real: Path, tmp_path: Path
) -> None:
    where = [str(real / "transformer"), "--save", str(tmp_path / "again")]
    done = subprocess.run(
        [*COMMAND, "check", *where, *SIZE], check=True, capture_output=True, text=True
    )
    shutil.rmtree(tmp_path / "again")
    seen = json.loads(done.stdout)
    print(seen)
    assert seen["different"] == [] and seen["tensors"] == 825 and seen["files"] > 3
    # On a CPU the model itself is in the host's memory; beside it at most one parameter, of all
    # layers stacked.
    assert seen["load_peak"] < seen["bytes"] + 1.2 * seen["largest"]
    assert seen["save_peak"] < 0.5 * seen["largest"]


@pytest.mark.slow
def test_wan_1_3b_draws_a_tiny_video(real: Path, tmp_path: Path) -> None:
    numbers, told, out = (
        np.random.default_rng(0),
        tmp_path / "told.safetensors",
        tmp_path / "latents.safetensors",
    )
    texts = {
        name: numbers.standard_normal((1, 512, 4096), np.float32)
        for name in ("text", "negative_text")
    }
    save_file(texts, told)
    command = [
        sys.executable,
        str(ROOT / "examples" / "generate_wan.py"),
        str(ROOT / "configs" / "wan_1_3b.yml"),
    ]
    files = ["--model", str(real), "--embeddings", str(told), "--latents", str(out)]
    size = ["num_inference_steps=4", "height=64", "width=96", "frames=9"]
    one_device = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run(
        [*command, *files, *size], check=True, capture_output=True, text=True, env=one_device
    )
    print(
        done.stdout,
        f"at most {getrusage(RUSAGE_CHILDREN).ru_maxrss / 2**20:.1f} GiB, with pages of the files",
    )
    assert "1,419.0 million parameters read" in done.stdout and "step 4/4" in done.stdout
    latents = load_file(out)["latents"]
    assert latents.shape == (1, 16, 3, 8, 12) and np.isfinite(latents).all()
    assert 0.1 < latents.std() < 10


@pytest.mark.slow
def test_wan_1_3b_is_diffusers_live(real: Path) -> None:
    """One forward in float32, from the same files, which diffusers reads with its own
    `from_pretrained`.
    """
    diffusers_or_skip()
    numbers, times = np.random.default_rng(1), np.array([900.0], np.float32)
    x, text = (
        numbers.standard_normal(shape, np.float32) for shape in ((1, 16, 3, 8, 12), (1, 512, 4096))
    )
    theirs = by_diffusers(real / "transformer", x, times, text)
    model = nnx.eval_shape(lambda: WanTransformer3D(SIZES["wan-2.1-t2v-1.3b"], rngs=nnx.Rngs(0)))
    weights.load_diffusers(model, real / "transformer")
    out = once(model, lambda m: m(jnp.moveaxis(x, 1, -1), jnp.asarray(times), jnp.asarray(text)))
    hold("Wan 2.1 1.3B, output", {"": np.moveaxis(out, -1, 1)}, {"": theirs}, 2e-5)


@pytest.mark.slow
def test_sdxl_is_diffusers_live(real_sdxl: Path) -> None:
    """The same for the UNet, whose text's keys and values are made beforehand here: 5 GB on disk,
    11 GB of memory.
    """
    shapes = {"x": (1, 4, 32, 32), "text": (1, 77, 2048), "pooled": (1, 1280)}
    numbers, times = np.random.default_rng(1), np.array([900.0], np.float32)
    given = {name: numbers.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    picture = np.array([[1024.0, 768.0, 0.0, 8.0, 1024.0, 1024.0]], np.float32)
    theirs = by_diffusers(
        real_sdxl / "unet", given["x"], times, given["text"], given["pooled"], picture
    )
    unet = nnx.eval_shape(lambda: UNet(rngs=nnx.Rngs(0)))
    weights.load_diffusers(unet, real_sdxl / "unet")
    text, pooled = jnp.asarray(given["text"]), jnp.asarray(given["pooled"])
    kv = once(unet, lambda m: m.encode(text))
    x = jnp.moveaxis(given["x"], 1, -1)
    out = once(unet, lambda m: m(x, jnp.asarray(times), None, pooled, jnp.asarray(picture), kv))
    hold("SDXL, output", {"": np.moveaxis(out, -1, 1)}, {"": theirs}, 2e-5)


def once(model: nnx.Module, call: Callable[[Any], Any]) -> Any:
    """Call a model compiled. Its parameters go in and not out again, as under `nnx.jit`: that would
    hold them twice.
    """
    graph, parameters = nnx.split(model)
    return jax.tree.map(np.asarray, jax.jit(lambda p: call(nnx.merge(graph, p)))(parameters))


def by_diffusers(
    folder: Path, x: np.ndarray, times: np.ndarray, text: np.ndarray, *more: np.ndarray
) -> np.ndarray:
    """Run diffusers' model of a folder once, in float32; `more` is a UNet's pooled text and the
    picture's sizes.
    """
    import diffusers
    import torch

    kind = getattr(diffusers, json.loads((folder / "config.json").read_text())["_class_name"])
    model = kind.from_pretrained(folder, torch_dtype=torch.float32).eval()
    conditions = dict(zip(("text_embeds", "time_ids"), map(torch.from_numpy, more), strict=False))
    how: dict[str, Any] = {"added_cond_kwargs": conditions} if conditions else {}
    with torch.no_grad():
        return model(*map(torch.from_numpy, (x, times, text)), **how, return_dict=False)[0].numpy()
