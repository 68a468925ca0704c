"""Flux.1's two text encoders, run by torch from a folder, one at a time."""

# torch and its packages are optional: types are checked without.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxattn_examples.sample.task import Arrays


def texts(
    folder: Path, prompts: Sequence[str], negative_prompt: str | None, tokens: int, device: str
) -> Arrays:
    """Encode prompts and the negative one: text, pooled, negative_text and negative_pooled.

    Args:
        folder: with tokenizer, text_encoder (CLIP), tokenizer_2 and text_encoder_2 (T5).
        prompts: a batch, for both encoders.
        negative_prompt: None is the empty prompt.
        tokens: of every prompt for T5; what is longer is cut. CLIP's length is its tokenizer's.
        device: cpu or cuda.
    """
    from transformers import CLIPTextModel, T5EncoderModel

    every = [*prompts, negative_prompt or ""]
    pooled = _encoded(folder, "", CLIPTextModel, every, None, device).pooler_output
    text = _encoded(folder, "_2", T5EncoderModel, every, tokens, device).last_hidden_state
    found = {"text": _numpy(text), "pooled": _numpy(pooled)}
    meant = {name: array[:-1] for name, array in found.items()}
    return meant | {f"negative_{name}": array[-1:] for name, array in found.items()}


def _encoded(
    folder: Path, which: str, kind: Any, prompts: list[str], tokens: int | None, device: str
) -> Any:
    """Return what an encoder says; padding is attended to, as in the model's training."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / f"tokenizer{which}")
    encoder = kind.from_pretrained(folder / f"text_encoder{which}", dtype="auto")
    encoder = encoder.to(device).eval()
    length = tokens or tokenizer.model_max_length
    how: dict[str, Any] = {"padding": "max_length", "max_length": length, "truncation": True}
    ids = tokenizer(prompts, return_tensors="pt", **how).input_ids.to(device)
    with torch.no_grad():
        return encoder(ids)


def _numpy(x: Any) -> np.ndarray:
    return x.float().cpu().numpy()
