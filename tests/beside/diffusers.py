"""Time diffusers' transformers where benchmarks/measure.py times ours: same sizes, random weights.

    python -m tests.beside.diffusers flux denoise
    python -m tests.beside.diffusers ti2v train --json out/ti2v.json
    python -m tests.beside.diffusers wan denoise --compile whole

A denoising step is one forward without guidance in bfloat16. A training step is flow matching with
AdamW and gradient checkpointing of every block: of LoRA on attention's projections, in float32
beside bfloat16 weights without autocast; with --lora 0 of all parameters, in float32 under
bfloat16's autocast.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.beside import timing
from tests.beside.timing import parser_of, report

FLOATS = {
    "denoise": "bf16 weights",
    "lora": "bf16 weights, LoRA and AdamW in float32, gradient checkpointing",
    "train": "float32 weights and AdamW, bf16 autocast, gradient checkpointing",
}


def main(args: argparse.Namespace) -> None:
    """Build the model, time the step, and print the figures."""
    import torch

    from tests.beside import models

    kind = "lora" if args.what == "train" and args.lora else args.what
    dtype = torch.float32 if kind == "train" else torch.bfloat16
    found = models.make(args.model, args.tiny, args.layers, args.device, dtype)
    step = (training if args.what == "train" else denoising)(found, args)
    attention = attention_of(args)
    found.transformer.set_attention_backend(attention)
    compile_parts(found.transformer, args)
    timing.forget_peak(args.device)
    facts = {
        "model": found.name,
        "step": args.what,
        "how": f"{FLOATS[kind]}; compile {args.compile} ({args.mode}), attention {attention}",
        "lora_rank": args.lora if kind == "lora" else 0,
        "compile": args.compile,
        "mode": args.mode,
        "attention": attention,
    }
    report(facts | timing.measure(step, args), args.json)


def attention_of(args: argparse.Namespace) -> str:
    """Name diffusers' backend: cuDNN's attention on a GPU, unless another was asked for."""
    return args.attention or ("native" if args.device == "cpu" else "_native_cudnn")


def compile_parts(model: Any, args: argparse.Namespace) -> None:
    """Let torch compile the repeated blocks, the whole model, or nothing."""
    mode = None if args.mode == "default" else args.mode
    if args.compile == "blocks":
        model.compile_repeated_blocks(fullgraph=args.fullgraph, mode=mode)
    elif args.compile == "whole":
        model.compile(mode=mode)


# ---- steps ---------------------------------------------------------------------------------------


def denoising(found: Any, args: argparse.Namespace) -> Callable[[], None]:
    """Return a step that moves the latents along a prediction."""
    import torch

    x = found.inputs["latents"]
    at = torch.full((len(x),), 0.5, device=x.device)
    found.transformer.eval().requires_grad_(False)

    @torch.no_grad()
    def step() -> None:
        velocity = found.predict(found.transformer, x, at, found.inputs)
        x.copy_(0.98 * x - 0.02 * velocity)  # of unit variance, as in benchmarks/model_steps

    return step


def training(found: Any, args: argparse.Namespace) -> Callable[[], None]:
    """Return a step of flow matching."""
    import torch

    from tests.beside import lora

    model, x = found.transformer.train(), found.inputs["latents"]
    learned = lora.add(model, args.lora) if args.lora else list(model.parameters())
    autocast = partial(torch.autocast, args.device, torch.bfloat16, enabled=not args.lora)
    model.enable_gradient_checkpointing()
    optimizer = torch.optim.AdamW(learned, lr=1e-5, fused=args.device != "cpu")
    draw = partial(torch.rand, len(x), device=x.device)

    def step() -> None:
        at, noise = draw(), torch.randn_like(x)
        share = at.reshape(-1, *[1] * (x.ndim - 1))
        with autocast():
            velocity = found.predict(model, (1 - share) * x + share * noise, at, found.inputs)
        loss = torch.nn.functional.mse_loss(velocity.float(), noise - x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


# ---- the command line ----------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    found = parser_of(__doc__)
    add = found.add_argument
    add("model", choices=("flux", "ti2v", "wan"))
    add("what", choices=("denoise", "train"))
    add("--layers", type=int, nargs="+", metavar="N", help="fewer; of Flux double and single ones")
    add("--lora", type=int, default=32, metavar="RANK", help="default 32; 0: all parameters learn")
    parts = ("blocks", "whole", "none")
    add("--compile", choices=parts, default="blocks", help="what torch compiles; default blocks")
    told = "refuse what breaks a block's graph; default yes"
    add("--fullgraph", action=argparse.BooleanOptionalAction, default=True, help=told)
    told = "diffusers' name of a backend; default _native_cudnn, on a CPU native"
    add("--attention", metavar="NAME", help=told)
    return found


if __name__ == "__main__":
    main(parser().parse_args())
