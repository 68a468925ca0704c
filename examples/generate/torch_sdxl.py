"""SDXL's two text encoders and its VAE, run by torch from a pipeline's folder, one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8

from .folder import index_of
from .kind import Arrays
from .media import to_pixels


def texts(folder: Path, prompts: Sequence[str], negative_prompt: str | None, device: str) -> Arrays:
    """Encode prompts and what guidance leads away from: text, pooled, negative_text and
    negative_pooled.

    Args:
        folder: with tokenizer, text_encoder, tokenizer_2 and text_encoder_2.
        prompts: a batch, for both encoders.
        negative_prompt: None is zeros where the pipeline says so (force_zeros_for_empty_prompt),
            else the empty prompt.
        device: cpu or cuda.
    """
    every = [*prompts, negative_prompt or ""]
    first, _ = _encoded(folder, "", every, device)
    second, pooled = _encoded(folder, "_2", every, device)
    text = np.concatenate([first, second], -1)
    if negative_prompt is None and index_of(folder).get("force_zeros_for_empty_prompt", True):
        text[-1], pooled[-1] = 0.0, 0.0
    told = {"text": text, "pooled": pooled}
    return {name: x[:-1] for name, x in told.items()} | {
        f"negative_{name}": x[-1:] for name, x in told.items()
    }


def _encoded(
    folder: Path, which: str, prompts: list[str], device: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the states before the last layer, and what the encoder puts first: for the second one,
    the pooled text.
    """
    import torch  # type: ignore[import-not-found]
    from transformers import (  # type: ignore[import-not-found]
        AutoTokenizer,
        CLIPTextModel,
        CLIPTextModelWithProjection,
    )

    tokenizer = AutoTokenizer.from_pretrained(folder / f"tokenizer{which}")
    kind = CLIPTextModelWithProjection if which else CLIPTextModel
    encoder = (
        kind.from_pretrained(folder / f"text_encoder{which}", dtype=torch.float32).to(device).eval()
    )
    how = {"padding": "max_length", "max_length": tokenizer.model_max_length, "truncation": True}
    ids = tokenizer(prompts, return_tensors="pt", **how).input_ids.to(device)
    with torch.no_grad():
        said = encoder(ids, output_hidden_states=True)
    return said.hidden_states[-2].cpu().numpy(), said[0].cpu().numpy()


def decode(
    folder: Path, latents: Float[np.ndarray, "B C h w"], device: str
) -> list[UInt8[np.ndarray, "H W 3"]]:
    """Decode latents into pictures, one after the other, in float32: float16 overflows in SDXL's
    VAE.

    Args:
        folder: with vae.
        latents: as the UNet sees them.
        device: cpu or cuda.
    """
    import torch  # type: ignore[import-not-found]
    from diffusers import AutoencoderKL  # type: ignore[import-not-found]

    vae = AutoencoderKL.from_pretrained(folder / "vae", torch_dtype=torch.float32).to(device).eval()
    scale, mean, std = (
        vae.config.get(key) for key in ("scaling_factor", "latents_mean", "latents_std")
    )
    found = []
    for one in latents:
        x = torch.tensor(one[None]).to(device) / scale
        if mean is not None and std is not None:
            x = x * torch.tensor(std, device=device).view(1, -1, 1, 1) + torch.tensor(
                mean, device=device
            ).view(1, -1, 1, 1)
        with torch.no_grad():
            picture = vae.decode(x, return_dict=False)[0][0]
        # [3, H, W] -> [H, W, 3]
        found.append(to_pixels(picture.float().cpu().numpy().transpose(1, 2, 0)))
    return found
