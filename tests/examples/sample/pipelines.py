"""Write folders in diffusers' format from fixtures, without diffusers, and run commands on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import generate
import numpy as np
from safetensors.numpy import load_file, save_file

from tests.examples.conftest import ROOT
from tests.examples.parity import part
from tests.fixtures import make_diffusers as made
from tests.fixtures import make_pipelines as runs

FIXTURES = Path(runs.__file__).parent
WAN = made.MODEL | {"_class_name": "WanTransformer3DModel"}
UNET = made.UNET | {"addition_embed_type": "text_time", "use_linear_projection": True}
SIZES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("wan", "wan_ti2v", "wan_a14b"), WAN),
    "wan_i2v": WAN | made.IMAGE,
    "sdxl": UNET | {"_class_name": "UNet2DConditionModel"},
    "flux": made.FLUX | {"_class_name": "FluxTransformer2DModel"},
    "flux_schnell": made.SCHNELL | {"_class_name": "FluxTransformer2DModel"},
}
VAES = {name: {"block_out_channels": [4, 4]} for name in ("sdxl", "flux", "flux_schnell")}
# float32 all through, as the fixtures are.
EXACT = (
    "model.dtype=float32",
    "weights_dtype=float32",
    f"guidance_scale={runs.GUIDANCE}",
    f"num_inference_steps={runs.STEPS}",
)
# Settings that a fixture was made with, beside those of all.
MORE = {
    "wan_a14b": (f"guidance_scale_2={runs.GUIDANCE_2}",),
    "wan_a14b_image": (f"guidance_scale_2={runs.GUIDANCE_2}",),
    "flux": (f"true_cfg_scale={runs.TRUE_CFG}",),
    "flux_schnell": ("guidance_scale=null",),
}
CONFIGS = {
    "wan": "wan_1_3b.yml",
    "wan_i2v": "wan_i2v_14b.yml",
    **dict.fromkeys(("wan_ti2v", "wan_ti2v_text", "wan_ti2v_image"), "wan_ti2v_5b.yml"),
    **dict.fromkeys(("wan_a14b", "wan_a14b_image"), "wan_a14b.yml"),
    "sdxl": "sdxl.yml",
    "flux": "flux.yml",
    "flux_schnell": "flux.yml",
    "demo": "wan_tiny_stream.yml",
}


def pipeline(path: Path, name: str, which: str) -> Path:
    """Write a pipeline's folder: the model's weights and sizes, the scheduler's options."""
    write_model(path / ("unet" if name == "sdxl" else "transformer"), name, runs.WEIGHTS[name])
    if name in runs.SECOND:
        write_model(path / "transformer_2", name, runs.SECOND[name])
    if name in runs.INDEX:
        (path / "model_index.json").write_text(json.dumps(runs.INDEX[name]))
    kind, options = runs.SCHEDULERS[name][which]
    (path / "scheduler").mkdir()
    scheduler = json.dumps({"_class_name": kind} | options)
    (path / "scheduler" / "scheduler_config.json").write_text(scheduler)
    if name in VAES:
        (path / "vae").mkdir()
        (path / "vae" / "config.json").write_text(json.dumps(VAES[name]))
    return path


def write_model(folder: Path, name: str, case: str) -> None:
    """Write a model's weights from a fixture, and its sizes."""
    weights = part(load_file(FIXTURES / f"diffusers_{case}.safetensors"), "weights.")
    folder.mkdir(parents=True)
    save_file(weights, folder / "diffusion_pytorch_model.safetensors")
    (folder / "config.json").write_text(json.dumps(SIZES[name]))


def told(path: Path, name: str) -> tuple[dict[str, np.ndarray], list[str]]:
    """Write the embeddings and noise of a fixture; return it, and options for the files."""
    arrays = load_file(FIXTURES / f"diffusers_run_{name}.safetensors")
    inputs = {key: value for key, value in arrays.items() if not key.startswith("out.")}
    files = {"noise": {"noise": inputs.pop("noise")}, "told": inputs}
    for file, tensors in files.items():
        save_file(tensors, path / f"{file}.safetensors")
    embeddings, noise = (str(path / f"{file}.safetensors") for file in ("told", "noise"))
    return arrays, ["--embeddings", embeddings, "--noise", noise]


def prepared(path: Path, name: str = "wan") -> tuple[Path, list[str]]:
    """Write a pipeline and the inputs of a fixture; return the folder and the options."""
    return pipeline(path, name, next(iter(runs.SCHEDULERS[name]))), told(path, name)[1]


def sizes_of(name: str) -> list[str]:
    """Return the options for the size of a fixture's samples."""
    size = runs.size_of(name).items()
    return [f"{'frames' if key == 'num_frames' else key}={value}" for key, value in size]


def draw(name: str, *arguments: object) -> None:
    """Run a command in this process."""
    sizes = [] if name in ("sdxl", "demo") else ["model.sizes=null", "sampling.timestep_shift=null"]
    config = str(ROOT / "configs" / CONFIGS[name])
    generate.main([config, *sizes, *map(str, arguments)])


def run(folder: Path, name: str, *arguments: object) -> np.ndarray:
    """Sample from a folder, and return the written latents."""
    file = folder / "latents.safetensors"
    settings = (*EXACT, *MORE.get(name, ()), *sizes_of(name))
    draw(name, "--model", folder, *settings, "--latents", file, *arguments)
    return load_file(file)["latents"]


def check(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())


def lora(path: Path, model: Path, part: str = "transformer") -> dict[str, np.ndarray]:
    """Write LoRA weights for one layer of a Wan model and for another part.

    Return the model's weights with the former merged, times 0.5.
    """
    numbers, layer = np.random.default_rng(0), "blocks.1.attn1.to_q"
    down, up = (numbers.standard_normal(shape, np.float32) for shape in ((2, 24), (24, 2)))
    tensors = {f"transformer.{layer}.lora_A.weight": down, f"transformer.{layer}.lora_B.weight": up}
    save_file(tensors | {"text_encoder.q.lora_A.weight": down}, path)
    weights = load_file(model / part / "diffusion_pytorch_model.safetensors")
    return weights | {f"{layer}.weight": weights[f"{layer}.weight"] + 0.5 * up @ down}
