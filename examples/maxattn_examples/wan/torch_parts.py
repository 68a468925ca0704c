"""Run Wan's text encoder, image encoder and VAE in torch from a folder, one at a time."""

# torch and its packages are optional: types are checked without.
# pyright: reportMissingImports=false

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from maxattn_examples.common.pipeline_folder import continues_images, index_of
from maxattn_examples.sample.task import Arrays
from maxattn_examples.sample.torch_parts import TextEncoder, to_numpy, to_pixels


def texts(folder: Path, prompts: Mapping[str, Sequence[str]], tokens: int, device: str) -> Arrays:
    """Encode prompts, with zeros for padding, as in the model's training.

    Args:
        folder: with tokenizer and text_encoder.
        prompts: by the name of the resulting array, [B, tokens, D].
        tokens: length to which prompts are padded or cut.
        device: cpu or cuda.
    """
    encoder, found = TextEncoder(folder, "UMT5EncoderModel", device), {}
    for name, batch in prompts.items():
        ids = encoder.tokens([cleaned(prompt) for prompt in batch], tokens)
        states = encoder(ids.input_ids, ids.attention_mask).last_hidden_state
        found[name] = to_numpy(states * ids.attention_mask[..., None])
    return found


def cleaned(prompt: str) -> str:
    """Fix broken Unicode (with ftfy, if installed), unescape HTML, and normalise spaces."""
    if find_spec("ftfy") is not None:
        import ftfy

        prompt = ftfy.fix_text(prompt)
    return re.sub(r"\s+", " ", html.unescape(html.unescape(prompt))).strip()


def image(folder: Path, path: Path, size: tuple[int, int, int], device: str) -> Arrays:
    """Encode the first frame for an image-to-video model.

    The result has "first", the image's latents, if the folder continues images. Otherwise it has
    "condition": mask channels, one for each frame of a latent, then the latents of a video that is
    the image followed by zeros. It also has "image", the image encoder's states, if there is one.

    Args:
        folder: with image_encoder, image_processor and vae.
        path: of the picture.
        size: frames, height and width of the video.
        device: cpu or cuda.
    """
    from PIL import Image

    picture = Image.open(path).convert("RGB")
    if continues_images(index_of(folder)):
        return {"first": _encoded(folder, picture, (1, *size[1:]), device)[0].numpy()}
    condition = {"condition": _condition(folder, picture, size, device)}
    if not (folder / "image_encoder").is_dir():
        return condition
    return {"image": _image_states(folder, picture, device)} | condition


def _image_states(folder: Path, picture: Any, device: str) -> np.ndarray:
    """Return the states before the image encoder's last layer."""
    import torch
    from transformers import CLIPImageProcessor, CLIPVisionModel

    processor = CLIPImageProcessor.from_pretrained(folder / "image_processor")
    encoder = CLIPVisionModel.from_pretrained(folder / "image_encoder", dtype=torch.float32)
    encoder = encoder.to(device).eval()
    with torch.no_grad():
        pixels = processor(images=picture, return_tensors="pt").to(device)
        states = encoder(**pixels, output_hidden_states=True).hidden_states[-2]
    return to_numpy(states)


def _condition(folder: Path, picture: Any, size: tuple[int, int, int], device: str) -> np.ndarray:
    """Encode the picture followed by zeros, and mark its frame."""
    import torch

    latents, frames = _encoded(folder, picture, size, device)
    given = torch.zeros(1, frames, *latents.shape[2:])
    given[:, :, 0] = 1.0
    return torch.cat([given, latents], 1).numpy()


def _encoded(
    folder: Path, picture: Any, size: tuple[int, int, int], device: str
) -> tuple[Any, int]:
    """Return the latents of a picture followed by zeros, and the frames per latent."""
    import torch
    from diffusers.video_processor import VideoProcessor

    vae, mean, std = _vae(folder, device)
    frames, height, width = size
    processor = VideoProcessor(vae_scale_factor=vae.config.scale_factor_spatial)
    video = torch.zeros(1, 3, frames, height, width)
    video[:, :, 0] = processor.preprocess(picture, height, width)
    with torch.no_grad():
        latents = (vae.encode(video.to(device)).latent_dist.mode() - mean) / std
    return latents.cpu(), vae.config.scale_factor_temporal


def decode(
    folder: Path, latents: Float[np.ndarray, "B C F h w"], device: str
) -> list[UInt8[np.ndarray, "f H W 3"]]:
    """Decode latents into videos, one after another.

    Args:
        folder: with vae.
        latents: scaled.
        device: cpu or cuda.
    """
    import torch

    vae, mean, std = _vae(folder, device)
    found = []
    for one in latents:
        with torch.no_grad():
            scaled = torch.tensor(one[None]).to(device) * std + mean
            video = vae.decode(scaled, return_dict=False)[0][0]
        # [3, F, H, W] -> [F, H, W, 3]
        found.append(to_pixels(to_numpy(video).transpose(1, 2, 3, 0)))
    return found


def _vae(folder: Path, device: str) -> tuple[Any, Any, Any]:
    """Load the VAE in float32, and the mean and standard deviation of its latents."""
    import torch
    from diffusers import AutoencoderKLWan

    vae = AutoencoderKLWan.from_pretrained(folder / "vae", torch_dtype=torch.float32)
    vae = vae.to(device).eval()
    mean, std = (
        torch.tensor(numbers, device=device).view(1, -1, 1, 1, 1)
        for numbers in (vae.config.latents_mean, vae.config.latents_std)
    )
    return vae, mean, std
