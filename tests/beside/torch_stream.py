"""Time a block of streamed video in plain torch, where `measure.py wan stream` times ours.

    python -m tests.beside.torch_stream
    python -m tests.beside.torch_stream --window 12 --sink 3 --backend flash
    python -m tests.beside.torch_stream --first --compile whole --mode reduce-overhead

A transformer like Wan 2.1 1.3B's with random weights in bfloat16, 832x480: 4 denoising passes and
a clean one over a rolling cache. Lengths are latent frames.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from tests.beside import timing
from tests.beside.timing import parser_of, report

SHIFT, VIDEO_FRAMES = 5.0, 4
TINY = {
    "heads": 2, "head_dim": 12, "layers": 2, "inner": 32, "rows": 2, "columns": 3, "text": 5,
    "times": 16,
}  # fmt: skip


def main(args: argparse.Namespace) -> None:
    """Build the model, time its blocks, and print the figures."""
    check(args)
    import torch

    from tests.beside.stream_model import Sizes

    torch.manual_seed(0)
    own = {"own": args.frames_per_block, "slots": args.window, "sink": args.sink}
    sizes = Sizes(**own, first=args.first, **(TINY if args.tiny else {}))
    block = graphed(block_of(sizes, args), args)
    timing.forget_peak(args.device)
    seen = timing.measure(block, args)
    report(described(sizes, args) | seen | rates(sizes, args, seen), args.json)


def check(args: argparse.Namespace) -> None:
    """Refuse a window that is no whole blocks, or that its sink fills."""
    size, window = args.frames_per_block, args.window
    if size < 1 or window < size or window % size:
        sys.exit(f"error: --window {window}: it is whole blocks of {size} frames")
    if not 0 <= args.sink <= window - size:
        sys.exit(f"error: --sink {args.sink}: it leaves room for a block of {size} in {window}")


# ---- a block -------------------------------------------------------------------------------------


def block_of(sizes: Any, args: argparse.Namespace) -> Callable[[], None]:
    """Return a function that makes the next block on the device, without waiting for it."""
    import torch

    from tests.beside.stream_model import rotary_of, slots_of

    model, sigmas = model_of(sizes, args), sigmas_of(args.denoising_steps)
    where = {"device": args.device}
    frame = torch.tensor(0 if sizes.first else sizes.slots, **where)
    times = [torch.full((sizes.own,), 1000.0 * s, **where) for s in sigmas]
    shape = (1, sizes.tokens, sizes.channels)

    @torch.no_grad()
    def block() -> None:
        seen = rotary_of(sizes, frame), slots_of(sizes, frame)
        x = torch.randn(shape, **where)
        for sigma, after, time in zip(sigmas, sigmas[1:], times, strict=False):
            x = x - sigma * model(x, time, *seen)
            x = (1 - after) * x + after * torch.randn(shape, **where)
        if args.clean_pass:
            model(x, times[-1], *seen)
        frame.add_(0 if sizes.first else sizes.own)

    return block


def sigmas_of(steps: int) -> list[float]:
    """Return the share of noise before each step, after the shift, and 0."""
    shares = [(steps - i) / steps for i in range(steps + 1)]
    return [SHIFT * u / (1 + (SHIFT - 1) * u) for u in shares]


def model_of(sizes: Any, args: argparse.Namespace) -> Any:
    """Build the transformer, and let torch compile its layers or all of it."""
    import torch

    from tests.beside.stream_model import Transformer

    torch.set_default_dtype(torch.bfloat16)
    with torch.device(args.device):
        model = Transformer(sizes, attend_with(args.backend, args.device))
    torch.set_default_dtype(torch.float32)
    model.eval().requires_grad_(False)
    mode = None if args.mode == "default" else args.mode
    if args.compile == "whole":
        model.compile(fullgraph=True, mode=mode)
    for layer in model.layers if args.compile == "blocks" else ():
        layer.compile(fullgraph=True, mode=mode)  # type: ignore[union-attr]
    return model


def attend_with(backend: str, device: str) -> Callable[..., Any]:
    """Return torch's attention, by one of its kernels on a GPU."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    if device == "cpu":
        return scaled_dot_product_attention
    kernels = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}

    def attend(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(kernels[backend]):
            return scaled_dot_product_attention(q, k, v)

    return attend


def graphed(block: Callable[[], None], args: argparse.Namespace) -> Callable[[], None]:
    """Record a block as one CUDA graph with --graph."""
    if not args.graph:
        return block
    import torch

    beside = torch.cuda.Stream()
    with torch.cuda.stream(beside):
        for _ in range(3):
            block()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        block()
    return graph.replay


# ---- figures -------------------------------------------------------------------------------


def described(sizes: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Describe the measured program."""
    seen = f"blocks of {sizes.own} latent frames, cache of {sizes.slots}, {sizes.sink} of them kept"
    which = "first block" if sizes.first else "full cache"
    graph = ", CUDA graph" if args.graph else ""
    return {
        "model": f"plain torch, {sizes.layers} layers of width {sizes.width}, {seen}, {which}",
        "step": "stream",
        "how": f"bf16; compile {args.compile} ({args.mode}){graph}, attention {args.backend}",
        "compile": args.compile,
        "mode": args.mode,
        "graph": args.graph,
        "attention": args.backend,
        "frames_per_block": sizes.own,
        "window": sizes.slots,
        "sink": sizes.sink,
        "first_block": sizes.first,
        "denoising_steps": args.denoising_steps,
        "clean_pass": args.clean_pass,
        "cache_bytes": 2 * sizes.layers * sizes.slots * sizes.frame * sizes.width * 2,
        "video_frames": VIDEO_FRAMES * sizes.own - (VIDEO_FRAMES - 1) * sizes.first,
    }


def rates(sizes: Any, args: argparse.Namespace, seen: dict[str, Any]) -> dict[str, Any]:
    """Compute frames of video a second, and attention's TFLOP/s if a profile has its time."""
    frames = VIDEO_FRAMES * sizes.own - (VIDEO_FRAMES - 1) * sizes.first
    keys = (sizes.own if sizes.first else sizes.slots) * sizes.frame + sizes.text
    passes = args.denoising_steps + args.clean_pass
    flop = 4 * passes * sizes.layers * sizes.tokens * keys * sizes.width
    spent = seen["breakdown_ms"]["attention"]
    return {
        "video_frames_per_s": 1e3 * frames / seen["ms"],
        "flop_attention_forward": flop,
        "attention_tflops": flop / spent / 1e9 if spent else None,
    }


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    found = parser_of(__doc__)
    add = found.add_argument
    add("--window", type=int, default=21, metavar="N", help="that a block sees; default 21")
    add("--sink", type=int, default=0, metavar="N", help="first ones that stay; default 0")
    add("--frames-per-block", type=int, default=3, metavar="N", help="default 3")
    told = "passes from noise, before the clean one; default 4"
    add("--denoising-steps", type=int, default=4, metavar="N", help=told)
    told = "a last pass, which keeps the clean block; default yes"
    add("--clean-pass", action=argparse.BooleanOptionalAction, default=True, help=told)
    add("--first", action="store_true", help="the first block, which sees itself alone")
    told = "of torch's attention on a GPU; default cudnn"
    add("--backend", choices=("cudnn", "flash"), default="cudnn", help=told)
    parts = ("blocks", "whole", "none")
    add("--compile", choices=parts, default="blocks", help="what torch compiles; default blocks")
    add("--graph", action="store_true", help="replay a block as one CUDA graph")
    return found


if __name__ == "__main__":
    main(parser().parse_args())
