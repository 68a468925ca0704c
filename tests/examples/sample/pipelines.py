"""Folders in diffusers' format, made of fixtures without diffusers, and the commands that draw from
them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.examples.conftest import ROOT
from tests.examples.parity import part
from tests.fixtures import make_diffusers as made
from tests.fixtures import make_pipelines as runs
from tests.fixtures import make_wan22 as wan22

FIXTURES = Path(runs.__file__).parent
SIZES: dict[str, dict[str, Any]] = {
    "wan": made.MODEL | {"_class_name": "WanTransformer3DModel"},
    "wan_i2v": made.MODEL | made.IMAGE | {"_class_name": "WanTransformer3DModel"},
    "wan_ti2v": made.MODEL | {"_class_name": "WanTransformer3DModel"},
    "wan_a14b": made.MODEL | {"_class_name": "WanTransformer3DModel"},
    "sdxl": made.UNET
    | {
        "_class_name": "UNet2DConditionModel",
        "addition_embed_type": "text_time",
        "use_linear_projection": True,
    },
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
SIZE = dict.fromkeys(SIZES, runs.VIDEO) | dict.fromkeys(VAES, runs.PICTURE)
SIZE |= dict.fromkeys(("wan_ti2v_text", "wan_ti2v_image"), wan22.VIDEO)
SIZE |= {"wan_a14b_image": runs.VIDEO}
# Settings that a fixture was made with, beside those of all.
MORE = {
    "wan_a14b": (f"guidance_scale_2={runs.GUIDANCE_2}",),
    "wan_a14b_image": (f"guidance_scale_2={runs.GUIDANCE_2}",),
    "flux": (f"true_cfg_scale={runs.TRUE_CFG}",),
    "flux_schnell": ("guidance_scale=null",),
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
    (path / "scheduler" / "scheduler_config.json").write_text(
        json.dumps({"_class_name": kind} | options)
    )
    if name in VAES:
        (path / "vae").mkdir()
        (path / "vae" / "config.json").write_text(json.dumps(VAES[name]))
    return path


def write_model(folder: Path, name: str, case: str) -> None:
    """Write a model's weights, from a fixture, and its sizes."""
    weights = part(load_file(FIXTURES / f"diffusers_{case}.safetensors"), "weights.")
    folder.mkdir(parents=True)
    save_file(weights, folder / "diffusion_pytorch_model.safetensors")
    (folder / "config.json").write_text(json.dumps(SIZES[name]))


def told(path: Path, name: str) -> tuple[dict[str, np.ndarray], list[str]]:
    """Write the embeddings and noise of a fixture; return it, and the options that name them."""
    held = load_file(FIXTURES / f"diffusers_run_{name}.safetensors")
    save_file({"noise": held["noise"]}, path / "noise.safetensors")
    arrays = {
        key: value for key, value in held.items() if key != "noise" and not key.startswith("out.")
    }
    save_file(arrays, path / "told.safetensors")
    return held, [
        "--embeddings",
        str(path / "told.safetensors"),
        "--noise",
        str(path / "noise.safetensors"),
    ]


def sizes_of(name: str) -> list[str]:
    """Name the size of a fixture's samples."""
    return [
        f"{'frames' if key == 'num_frames' else key}={value}" for key, value in SIZE[name].items()
    ]


def draw(name: str, *arguments: str) -> None:
    """Run a command in this process, as a user would in one of its own."""
    if str(ROOT / "examples") not in sys.path:
        sys.path.insert(0, str(ROOT / "examples"))
    import generate_flux
    import generate_sdxl
    import generate_wan
    from sample.command import arguments_of

    config = {
        "wan": "wan_1_3b.yml",
        "wan_i2v": "wan_i2v_14b.yml",
        "wan_ti2v": "wan_ti2v_5b.yml",
        "wan_ti2v_text": "wan_ti2v_5b.yml",
        "wan_ti2v_image": "wan_ti2v_5b.yml",
        "wan_a14b": "wan_a14b.yml",
        "wan_a14b_image": "wan_a14b.yml",
        "sdxl": "sdxl.yml",
        "flux": "flux.yml",
        "flux_schnell": "flux.yml",
        "demo": "wan_tiny.yml",
    }[name]
    sizes = [] if name in ("sdxl", "demo") else ["model.sizes=null", "sampling.timestep_shift=null"]
    commands = {"sdxl": generate_sdxl, "flux": generate_flux, "flux_schnell": generate_flux}
    command = commands.get(name, generate_wan)
    command.main(arguments_of("", [str(ROOT / "configs" / config), *sizes, *map(str, arguments)]))


def run(folder: Path, name: str, *arguments: object) -> np.ndarray:
    """Draw from a folder, and return the latents that were written."""
    file = folder / "latents.safetensors"
    said = (*EXACT, *MORE.get(name, ()), *sizes_of(name))
    draw(name, "--model", folder, *said, "--latents", file, *arguments)
    return load_file(file)["latents"]


def check(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())


def lora(path: Path, model: Path, part: str = "transformer") -> dict[str, np.ndarray]:
    """Write LoRA weights for one layer of a Wan model and one of another part; return the model's
    weights with them.
    """
    draw_numbers, layer = np.random.default_rng(0), "blocks.1.attn1.to_q"
    down, up = (draw_numbers.standard_normal(shape, np.float32) for shape in ((2, 24), (24, 2)))
    tensors = {f"transformer.{layer}.lora_A.weight": down, f"transformer.{layer}.lora_B.weight": up}
    save_file(tensors | {"text_encoder.q.lora_A.weight": down}, path)
    weights = load_file(model / part / "diffusion_pytorch_model.safetensors")
    return weights | {f"{layer}.weight": weights[f"{layer}.weight"] + 0.5 * up @ down}
