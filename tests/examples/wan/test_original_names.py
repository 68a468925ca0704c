"""Weights under the names of Wan's own code, wrapped as Self-Forcing and similar projects do."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx
from maxattn_examples.wan.model import WanTransformer3D
from maxattn_examples.wan.settings import Sizes
from safetensors.numpy import save_file

import maxattn as ma
from maxattn import weights
from maxattn.errors import WeightsError
from tests.fixtures import make_diffusers as made
from tests.golden_text import check_golden, check_refused

# Parameters of Wan's own code, and diffusers' names of the same: written a second time, by hand.
NAMES = {
    "patch_embedding": "patch_embedding",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "head.head": "proj_out",
    "head.modulation": "scale_shift_table",
    "img_emb.proj.0": "condition_embedder.image_embedder.norm1",
    "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
    "img_emb.proj.4": "condition_embedder.image_embedder.norm2",
}
OF_A_BLOCK = {
    "modulation": "scale_shift_table",
    "norm3": "norm2",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
    **{f"self_attn.{x}": f"attn1.to_{x}" for x in "qkv"},
    **{f"cross_attn.{x}": f"attn2.to_{x}" for x in "qkv"},
    "self_attn.o": "attn1.to_out.0",
    "cross_attn.o": "attn2.to_out.0",
    **{f"self_attn.norm_{x}": f"attn1.norm_{x}" for x in "qk"},
    **{f"cross_attn.norm_{x}": f"attn2.norm_{x}" for x in "qk"},
    **{f"cross_attn.{x}_img": f"attn2.add_{x}_proj" for x in "kv"},
    "cross_attn.norm_k_img": "attn2.norm_added_k",
}
BLOCKS = range(made.MODEL["num_layers"])
THEIRS = {ours: name for name, ours in NAMES.items()} | {
    f"blocks.{i}.{ours}": f"blocks.{i}.{name}" for i in BLOCKS for name, ours in OF_A_BLOCK.items()
}


def model(seed: int, **sizes: Any) -> WanTransformer3D:
    """Make a small transformer in which no two numbers are equal by chance."""
    found = WanTransformer3D(Sizes(**(made.MODEL | sizes)), ma.AttentionConfig(), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(seed)
    for _, variable in nnx.to_flat_state(nnx.state(found, nnx.Param)):
        variable.set_value(rng.normal(size=variable.get_value().shape).astype(np.float32))
    return found


def original(of: WanTransformer3D) -> dict[str, np.ndarray]:
    """Return its parameters as Wan's own code names them."""
    found = {}
    for name, array in weights.to_diffusers(of).items():
        layer, end = re.fullmatch(r"(.*?)(\.weight|\.bias)?", name).groups("")  # pyright: ignore
        found[THEIRS[layer] + end] = np.ascontiguousarray(array)
    return found


def same(one: nnx.Module, other: nnx.Module) -> bool:
    """Check whether two models have the same parameters."""
    mine, theirs = (weights.to_diffusers(x) for x in (one, other))
    return all(np.array_equal(x, theirs[name]) for name, x in mine.items())


FSDP = "_fsdp_wrapped_module."
PREFIXES = ("", "model.", "generator.model.", "generator_ema.model.", "model.diffusion_model.")


@pytest.mark.parametrize("prefix", (*PREFIXES, f"generator_ema.model.{FSDP}"))
def test_wrapped_weights_are_read_from_a_file(prefix: str, tmp_path: Path) -> None:
    """The file is an image-to-video model's, which has all names; FSDP wraps each block too."""
    want, got = (model(seed, **made.IMAGE) for seed in (1, 2))
    held = {prefix + name: x for name, x in original(want).items()}
    if FSDP in prefix:
        held = {re.sub(r"(blocks\.\d+\.)", rf"\1{FSDP}", name): x for name, x in held.items()}
    save_file(held, tmp_path / "model.safetensors")
    assert weights.load_diffusers(got, tmp_path / "model.safetensors") == weights.Loaded()
    assert same(got, want)


def test_averaged_parameters_are_taken_and_others_by_their_prefix(caplog: Any) -> None:
    last, averaged, got = model(1), model(2), model(3)
    both = {f"generator.model.{name}": x for name, x in original(last).items()}
    both |= {f"generator_ema.model.{name}": x for name, x in original(averaged).items()}
    both["critic.model.head.head.weight"] = np.zeros(1, np.float32)
    with caplog.at_level(logging.WARNING, "maxattn"):
        weights.load_diffusers(got, both)
    assert same(got, averaged)
    check_golden("weights/averaged_are_taken", caplog.messages[0])
    weights.load_diffusers(got, both, prefix="generator.model.")
    assert same(got, last)


@pytest.mark.parametrize("case", ["misfit", "twice"])
def test_what_does_not_fit_is_named_by_our_names(case: str) -> None:
    """A missing parameter, an unexpected one, and one under two names."""
    got, held = model(1), original(model(2))
    if case == "twice":
        held[f"{FSDP}head.head.bias"] = held["head.head.bias"]
    else:
        held = {f"generator.model.{name}": x for name, x in held.items()}
        del held["generator.model.blocks.1.ffn.2.weight"]
        held["generator.model._cls_pred_branch.0.weight"] = np.zeros(3, np.float32)
    check_refused(f"weights/original_names_{case}", WeightsError, weights.load_diffusers, got, held)
    assert same(got, model(1)), "a refusal changes nothing"


def test_a_pickle_is_refused_with_what_helps(tmp_path: Path) -> None:
    (tmp_path / "self_forcing_dmd.pt").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"safetensors\.torch\.save_file"):
        weights.load_diffusers(model(1), tmp_path / "self_forcing_dmd.pt")
