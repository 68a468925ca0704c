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


def main(said: argparse.Namespace) -> None:
    """Build the model, time its blocks, and say what was seen."""
    check(said)
    import torch

    from tests.beside.stream_model import Sizes

    torch.manual_seed(0)
    own = {"own": said.frames_per_block, "slots": said.window, "sink": said.sink}
    sizes = Sizes(**own, first=said.first, **(TINY if said.tiny else {}))
    block = graphed(block_of(sizes, said), said)
    timing.forget_peak(said.device)
    seen = timing.measure(block, said)
    report(described(sizes, said) | seen | rates(sizes, said, seen), said.json)


def check(said: argparse.Namespace) -> None:
    """Refuse a window that is no whole blocks, or that its sink fills."""
    size, window = said.frames_per_block, said.window
    if size < 1 or window < size or window % size:
        sys.exit(f"error: --window {window}: it is whole blocks of {size} frames")
    if not 0 <= said.sink <= window - size:
        sys.exit(f"error: --sink {said.sink}: it leaves room for a block of {size} in {window}")


# ---- a block -------------------------------------------------------------------------------------


def block_of(sizes: Any, said: argparse.Namespace) -> Callable[[], None]:
    """Return what makes the next block: all of it is on the device, and nothing waits."""
    import torch

    from tests.beside.stream_model import rotary_of, slots_of

    model, sigmas = model_of(sizes, said), sigmas_of(said.denoising_steps)
    where = {"device": said.device}
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
        if said.clean_pass:
            model(x, times[-1], *seen)
        frame.add_(0 if sizes.first else sizes.own)

    return block


def sigmas_of(steps: int) -> list[float]:
    """Return the share of noise before each step, after the shift, and 0."""
    shares = [(steps - i) / steps for i in range(steps + 1)]
    return [SHIFT * u / (1 + (SHIFT - 1) * u) for u in shares]


def model_of(sizes: Any, said: argparse.Namespace) -> Any:
    """Build the transformer, and let torch compile its layers or all of it."""
    import torch

    from tests.beside.stream_model import Transformer

    torch.set_default_dtype(torch.bfloat16)
    with torch.device(said.device):
        model = Transformer(sizes, attend_with(said.backend, said.device))
    torch.set_default_dtype(torch.float32)
    model.eval().requires_grad_(False)
    mode = None if said.mode == "default" else said.mode
    if said.compile == "whole":
        model.compile(fullgraph=True, mode=mode)
    for layer in model.layers if said.compile == "blocks" else ():
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


def graphed(block: Callable[[], None], said: argparse.Namespace) -> Callable[[], None]:
    """Record a block as one CUDA graph, where that was asked for."""
    if not said.graph:
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


# ---- what was seen -------------------------------------------------------------------------------


def described(sizes: Any, said: argparse.Namespace) -> dict[str, Any]:
    """Say what is measured."""
    seen = f"blocks of {sizes.own} latent frames, cache of {sizes.slots}, {sizes.sink} of them kept"
    which = "first block" if sizes.first else "full cache"
    graph = ", CUDA graph" if said.graph else ""
    return {
        "model": f"plain torch, {sizes.layers} layers of width {sizes.width}, {seen}, {which}",
        "step": "stream",
        "how": f"bf16; compile {said.compile} ({said.mode}){graph}, attention {said.backend}",
        "compile": said.compile,
        "mode": said.mode,
        "graph": said.graph,
        "attention": said.backend,
        "frames_per_block": sizes.own,
        "window": sizes.slots,
        "sink": sizes.sink,
        "first_block": sizes.first,
        "denoising_steps": said.denoising_steps,
        "clean_pass": said.clean_pass,
        "cache_bytes": 2 * sizes.layers * sizes.slots * sizes.frame * sizes.width * 2,
        "video_frames": VIDEO_FRAMES * sizes.own - (VIDEO_FRAMES - 1) * sizes.first,
    }


def rates(sizes: Any, said: argparse.Namespace, seen: dict[str, Any]) -> dict[str, Any]:
    """Compute frames of video a second, and attention's TFLOP/s where a profile says its time."""
    frames = VIDEO_FRAMES * sizes.own - (VIDEO_FRAMES - 1) * sizes.first
    keys = (sizes.own if sizes.first else sizes.slots) * sizes.frame + sizes.text
    passes = said.denoising_steps + said.clean_pass
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
