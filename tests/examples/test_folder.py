"""Random folders load and save bit for bit, and real sizes load in bounded host memory."""

from __future__ import annotations

import inspect
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from maxattn_examples import random_folder as folder
from maxattn_examples.flux.settings import Sizes as FluxSizes
from maxattn_examples.sdxl.settings import Sizes as UNetSizes
from maxattn_examples.sdxl.unet import UNet
from maxattn_examples.wan.model import WanTransformer3D
from maxattn_examples.wan.settings import SIZES, Sizes

from maxattn import weights
from tests.closeness import hold
from tests.fixtures import make_diffusers as made
from tests.packages import skip_without

from .conftest import ROOT

WHOLE = 2**30  # bytes of a file: all tensors are in one


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the sizes of every name by small ones."""
    names = ("small", "wan-2.2-t2v-a14b", "wan-2.2-ti2v-5b")
    monkeypatch.setattr(folder, "SIZES", dict.fromkeys(names, Sizes(**made.MODEL)))
    flux = {"flux.1-dev": made.FLUX, "flux.1-schnell": made.SCHNELL}
    monkeypatch.setattr(folder, "FLUX_SIZES", {n: FluxSizes(**x) for n, x in flux.items()})
    init = {"__init__": lambda self: UNetSizes.__init__(self, **made.UNET)}
    monkeypatch.setattr(folder, "UNetSizes", type("SmallUNet", (UNetSizes,), init))


@pytest.mark.parametrize(("name", "size"), [("small", 4000), ("flux.1-schnell", 8000)])
def test_a_made_folder_saves_back_bit_for_bit(name: str, size: int, tmp_path: Path) -> None:
    files = folder.make(tmp_path / "made", name, "bfloat16", size)
    assert len(files) > 3
    whole = tmp_path / "made" / "transformer"
    seen = folder.check(whole, tmp_path / "again", "bfloat16", 6000)
    assert seen["different"] == [] and seen["tensors"] == len(weights.SafeTensors(whole))
    again = weights.SafeTensors(tmp_path / "again")
    exact = {np.dtype("float32")} if name == "small" else set()  # Wan's norms, as in diffusers
    assert {again[key][()].dtype for key in again} == {np.dtype("bfloat16")} | exact


def test_one_flipped_bit_is_found(tmp_path: Path) -> None:
    folder.make(tmp_path / "made", "small", "bfloat16", WHOLE)
    first, again = tmp_path / "made" / "transformer", tmp_path / "again"
    folder.check(first, again, "bfloat16", WHOLE)
    path = again / "diffusion_pytorch_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert len(folder.different(first, again)) == 1


def test_the_folders_of_wan_2_2_have_their_own_index(tmp_path: Path) -> None:
    names = ("wan-2.2-t2v-a14b", "wan-2.2-ti2v-5b")
    for name in names:
        folder.make(tmp_path / name, name, "bfloat16", WHOLE)
    two, one = (json.loads((tmp_path / name / "model_index.json").read_text()) for name in names)
    assert two["boundary_ratio"] == 0.875 and one["expand_timesteps"]
    parts = [tmp_path / names[0] / part for part in ("transformer", "transformer_2")]
    assert len(folder.different(*parts)) > 20, "two experts"
    assert not (tmp_path / names[1] / "transformer_2").exists()


def test_random_tensors_have_their_own_seeds() -> None:
    form, names = folder.Form((64,), np.dtype("float32")), ("a.weight", "b.weight", "norm_q.weight")
    one, other, scale = (folder.random(name, form) for name in names)
    assert (one != other).all() and abs(scale.mean() - 1) < 0.1
    np.testing.assert_array_equal(one, folder.random("a.weight", form))


@pytest.mark.parametrize(
    ("name", "part"), [("small", "transformer"), ("sdxl", "unet"), ("flux.1-dev", "transformer")]
)
def test_diffusers_reads_made_folders(name: str, part: str, tmp_path: Path) -> None:
    diffusers_or_skip()
    import diffusers

    folder.make(tmp_path, name, "float32", 100_000)
    config = json.loads((tmp_path / part / "config.json").read_text())
    kind = getattr(diffusers, config["_class_name"])
    state = kind.from_pretrained(tmp_path / part).state_dict()
    tensors = weights.SafeTensors(tmp_path / part)
    assert set(state) == set(tensors)
    for key, value in state.items():
        np.testing.assert_array_equal(value.numpy(), tensors[key][()], err_msg=key)
    known = inspect.signature(kind.__init__).parameters.keys()
    assert config.keys() - known == {"_class_name"}
    steps = json.loads((tmp_path / "scheduler" / "scheduler_config.json").read_text())
    scheduler = getattr(diffusers, steps.pop("_class_name"))
    options = scheduler.from_pretrained(tmp_path / "scheduler").config
    assert {key: options[key] for key in steps} == steps


def diffusers_or_skip() -> None:
    skip_without("torch", "diffusers", "accelerate")


# ---- the real size: 3 GB on disk, and as much again for a moment; at most about 11 GB of memory --

SIZE = ("--dtype", "bfloat16", "--shard-gib", "1")
COMMAND = [sys.executable, str(ROOT / "examples" / "folder.py")]


@pytest.fixture(scope="module", params=["wan-2.1-t2v-1.3b", "sdxl"])
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Make a model of random weights in another process; it is deleted afterwards."""
    path = tmp_path_factory.mktemp("real")
    subprocess.run([*COMMAND, "make", str(path), "--model", request.param, *SIZE], check=True)
    yield path / ("unet" if request.param == "sdxl" else "transformer")
    shutil.rmtree(path)


@pytest.mark.slow
@pytest.mark.parametrize("real", ["wan-2.1-t2v-1.3b"], indirect=True)
def test_wan_1_3b_loads_and_saves_with_one_parameter_more_than_the_model_in_memory(
    real: Path, tmp_path: Path
) -> None:
    command = [*COMMAND, "check", str(real), "--save", str(tmp_path / "again"), *SIZE]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    shutil.rmtree(tmp_path / "again")
    seen = json.loads(done.stdout)
    print(seen)
    assert seen["different"] == [] and seen["tensors"] == 825 and seen["files"] > 3
    # On a CPU the model itself is in the host's memory; beside it at most one parameter, of all
    # layers stacked.
    assert seen["load_peak"] < seen["bytes"] + 1.2 * seen["largest"]
    assert seen["save_peak"] < 0.5 * seen["largest"]


@pytest.mark.slow
def test_a_real_model_is_diffusers_live(real: Path) -> None:
    """One forward in float32 from the same files; for SDXL the text is encoded before."""
    diffusers_or_skip()
    is_unet = real.name == "unet"
    shapes = {"x": (1, 16, 3, 8, 12), "text": (1, 512, 4096)}
    if is_unet:
        shapes = {"x": (1, 4, 32, 32), "text": (1, 77, 2048), "pooled": (1, 1280)}
    rng, t = np.random.default_rng(1), np.array([900.0], np.float32)
    given = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    if is_unet:
        given["picture"] = np.array([[1024.0, 768.0, 0.0, 8.0, 1024.0, 1024.0]], np.float32)
    wanted = by_diffusers(real, t, *given.values())
    x, text, *more = (jnp.asarray(array) for array in given.values())
    x, times = jnp.moveaxis(x, 1, -1), jnp.asarray(t)
    size = SIZES["wan-2.1-t2v-1.3b"]
    build: Any = UNet if is_unet else lambda rngs: WanTransformer3D(size, rngs=rngs)
    model = nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0)))
    weights.load_diffusers(model, real)
    if is_unet:
        kv = once(model, lambda m: m.encode(text))
        out = once(model, lambda m: m(x, times, None, *more, kv))
    else:
        out = once(model, lambda m: m(x, times, text))
    hold(f"{real.name}, output", {"": np.moveaxis(out, -1, 1)}, {"": wanted}, 2e-5)


def once(model: nnx.Module, call: Callable[[Any], Any]) -> Any:
    """Call a model compiled; its parameters are inputs but not outputs, which would copy them."""
    graph, parameters = nnx.split(model)
    return jax.tree.map(np.asarray, jax.jit(lambda p: call(nnx.merge(graph, p)))(parameters))


def by_diffusers(
    folder: Path, times: np.ndarray, x: np.ndarray, text: np.ndarray, *more: np.ndarray
) -> np.ndarray:
    """Run diffusers' model once, in float32; `more` is a UNet's pooled text and picture sizes."""
    import diffusers
    import torch

    kind = getattr(diffusers, json.loads((folder / "config.json").read_text())["_class_name"])
    model = kind.from_pretrained(folder, torch_dtype=torch.float32).eval()
    conditions = dict(zip(("text_embeds", "time_ids"), map(torch.from_numpy, more), strict=False))
    how: dict[str, Any] = {"added_cond_kwargs": conditions} if conditions else {}
    with torch.no_grad():
        return model(*map(torch.from_numpy, (x, times, text)), **how, return_dict=False)[0].numpy()
