"""SDXL's two text encoders, run by torch from a folder, one at a time."""

# torch and its packages are optional: types are checked without.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from maxattn_examples.common.pipeline_folder import index_of
from maxattn_examples.sample.task import Arrays


def texts(folder: Path, prompts: Sequence[str], negative_prompt: str | None, device: str) -> Arrays:
    """Encode prompts and the negative one: text, pooled, negative_text and negative_pooled.

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
    told = {"text": text[:-1], "pooled": pooled[:-1]}
    return told | {"negative_text": text[-1:], "negative_pooled": pooled[-1:]}


def _encoded(
    folder: Path, which: str, prompts: list[str], device: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the states before the last layer, and the first output, of `_2` the pooled text."""
    import torch
    from transformers import AutoTokenizer, CLIPTextModel, CLIPTextModelWithProjection

    tokenizer = AutoTokenizer.from_pretrained(folder / f"tokenizer{which}")
    kind = CLIPTextModelWithProjection if which else CLIPTextModel
    encoder = kind.from_pretrained(folder / f"text_encoder{which}", dtype=torch.float32)
    encoder = encoder.to(device).eval()
    how = {"padding": "max_length", "max_length": tokenizer.model_max_length, "truncation": True}
    ids = tokenizer(prompts, return_tensors="pt", **how).input_ids.to(device)
    with torch.no_grad():
        said = encoder(ids, output_hidden_states=True)
    return said.hidden_states[-2].cpu().numpy(), said[0].cpu().numpy()
