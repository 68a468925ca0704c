"""LoRA that was trained by layers is written as diffusers has them: several in one tensor."""

from __future__ import annotations

import numpy as np
from flax import nnx
from train import lora

from maxattn import weights
from tests.weights.test_fused import C, H, Model, N

INNER, MLP = N * H, 5


def test_what_is_trained_by_layers_is_written_as_diffusers_has_it() -> None:
    """Also where a layer of several has no LoRA; merged back, it is the change that was learned."""
    model, plain = Model(0), Model(0)
    lora.add(model, 2, 4.0, ("to_q", "to_v"), rngs=nnx.Rngs(1))
    for _, module in lora.adapted(model):
        module.lora_B[...] = np.random.default_rng(3).normal(size=module.lora_B.shape)
    held = lora.to_diffusers(model, "transformer.")
    layers = ("one", "stacked.0", "stacked.1", "stacked.2")
    ends = {"lora_A": (4, C), "lora_B": (3 * INNER + MLP, 4)}
    shapes = {f"transformer.{x}.to_all.{e}.weight": ends[e] for x in layers for e in ends}
    assert {name: x.shape for name, x in held.items()} == shapes
    lora.merge(model, merged := nnx.eval_shape(lambda: Model(0)))
    weights.merge_lora(plain, held)
    ours, theirs = weights.to_diffusers(plain), weights.to_diffusers(merged)
    for name, x in theirs.items():
        np.testing.assert_allclose(ours[name], x, atol=1e-5, err_msg=name)
