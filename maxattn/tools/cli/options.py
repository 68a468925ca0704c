"""The options of each command, and what its --help says. Nothing here imports jax.

A function has the name of its command; its docstring is the text above the options.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from pathlib import Path

from maxattn.jax_private.versions import AITER, CUDNN
from maxattn.kernels.table import EXTRAS
from maxattn.tools.known_models import KNOWN_SHAPES, MODELS

Parser = argparse.ArgumentParser
STRATEGIES = ("ring", "ulysses", "all_gather", "ulysses_ring")
REPORTS = ("implementations", "block-window", "layers")
PACKAGES = (*EXTRAS, *CUDNN, AITER)  # what a kernel's choice can depend on beside jax
STREAM_EXAMPLE = "wan-1.3b-480p,frames=3,window=7"


def parser_of(name: str) -> Parser:
    """Return the parser of a command."""
    form = argparse.RawDescriptionHelpFormatter
    about = inspect.getdoc(OPTIONS[name])
    parser = Parser(f"maxattn {name}", description=about, formatter_class=form)
    OPTIONS[name](parser)
    return parser


# ---- the commands --------------------------------------------------------------------------------


def explain(parser: Parser) -> None:
    r"""Say what would run for each shape, and why: kernel, parallelism, block sizes, transfers.

      maxattn explain configs/wan_14b.yml --shape wan-14b-720p --target "TPU v5p" --mesh context=4
      maxattn explain attention=ring --shape 1,32760,32760,12,128 --target "NVIDIA H200" \
          --mesh context=8
      maxattn explain --stream wan-1.3b-480p,frames=3,window=7,sink=0 --target H200

    It needs no device.
    """
    _config(parser)
    _shape(parser)
    _machine(parser)
    stream = (
        f"a video made block by block, such as {STREAM_EXAMPLE},sink=0: one of"
        f" {', '.join(MODELS)}, or tokens= (of a frame), heads=, head_dim= and layers= of another"
        " model, and: frames= of a block, window= in blocks, or all, sink= in frames,"
        " first_frame_alone, steps= of a block (default 4), clean_pass=false, length= of the video"
        " in frames, kv_heads=, context=heads or tokens; default what CONFIG's section rollout says"
    )
    parser.add_argument("--stream", metavar="NAME,key=value,...", help=stream)
    why = "print the sums of every strategy that `context_parallel: auto` weighs"
    parser.add_argument("--why", action="store_true", help=why)


def check(parser: Parser) -> None:
    r"""Validate a config; print what it sets, the plan of each shape, its memory, and advice.

      maxattn check configs/wan_14b.yml --shape wan-14b-720p --shape wan-14b-cross \
          --target "TPU v5p" --devices 8 --batch 2
      maxattn check --maxdiffusion base_wan_14b.yml --shape wan-14b-720p --target "TPU v6e"

    Wrong keys and values are reported all at once, with file and line; the exit status is then 1,
    as it is when a shape cannot run or does not fit.
    """
    _config(parser)
    _shape(parser)
    _machine(parser)
    lengths = (
        "real keys of each example, such as 300,512, or of all, such as 300: where"
        " mask_padding_tokens is false, advice names the share of padding that is attended to;"
        " masked padding changes nothing"
    )
    add = parser.add_argument
    add("--maxdiffusion", action="store_true", help="CONFIG is a MaxDiffusion YAML")
    add("--all", action="store_true", help="print every key, those at their default too")
    inference = "the forward alone: its block sizes, its memory"
    add("--inference", action="store_true", help=inference)
    add("--lengths", help=lengths)


def compile(parser: Parser) -> None:
    r"""Compile attention for TPUs that are not there, with the TPU's compiler; say whether it fits.

      maxattn compile configs/wan_14b.yml ici_fsdp_parallelism=1 --target v5p:2x2x1 \
          --shape wan-14b-720p
      maxattn compile attention=ring ici_context_parallelism=4 --target v6e:2x2 \
          --shape wan-14b-480p --train --module

    Needs libtpu (pip install "maxattn[tpu]"), no TPU. Each shape is compiled in a process of its
    own. Exit status 0: all of them compile and fit; 1: one does not, or its estimate was refused.

      maxattn compile attention=flash --target v6e --devices 1 --shape wan-1.3b-480p --estimate

    prices every Pallas kernel, and the whole program, by the schedule that libtpu made. Nothing
    runs. --block 13824 --layers 40 beside it predicts a step of a model from one of its blocks.
    """
    _config(parser)
    _shape(parser)
    target = (
        "chips along each side: v4:2x2x1, v5e:2x2, v5p:2x2x1, v6e:2x2, tpu7x:2x2x1; default a host"
    )
    module = (
        "a whole FlaxAttention or CrossAttention as Wan has it: "
        "projections with bias, norms across heads, RoPE"
    )
    block = (
        "a whole transformer block as Wan has it: both attentions and a feed-forward of this"
        " width; remat_policy holds for it"
    )
    estimate = "price each kernel, and the whole, by the schedule that libtpu makes; nothing runs"
    file = (
        "compile FUNCTION(q, k, v, config) of a file in place of maxattn's attention, on one"
        " device: arrays [B, T, N, H]; every query sees every key"
    )
    layers = "with --estimate: what so many of them take, one after the other"
    slices = "so many of the topology, for dcn_*_parallelism"
    add = parser.add_argument
    add("--target", required=True, help=target)
    add("--devices", type=int, help="use the first N devices of the topology")
    add("--slices", type=int, default=1, metavar="N", help=slices)
    add("--train", action="store_true", help="forward and backward; default forward")
    add("--module", action="store_true", help=module)
    add("--block", type=int, default=0, metavar="N", help=block)
    add("--layers", type=int, default=1, metavar="N", help=layers)
    add("--estimate", action="store_true", help=estimate)
    add("--kernel-file", default="", metavar="PATH:FUNCTION", help=file)
    limit = "seconds a compile; default 600"
    add("--time-limit", type=float, default=600.0, metavar="S", help=limit)
    add("--json", action="store_true", help="print everything as JSON")


def tune(parser: Parser) -> None:
    """Time kernels, or the sizes of one, on a model's calls on this machine, and keep the fastest.

      maxattn tune configs/wan_14b.yml
      maxattn tune wan-14b-480p wan-14b-cross
      maxattn tune attention=auto --shape 64,256,256,16,72 --forward
      maxattn tune attention=flash --shape wan-14b-720p --target v6e --offline

    On GPUs and CPUs `attention: auto` has its kernels timed: every one that can run the call, in
    turns. Plans on this machine then take the fastest first. On TPUs, and where a kernel is named,
    its sizes are timed: plans take them where the config sets none. --kernels and --sizes choose.

    Each measurement is kept at once in ~/.cache/maxattn (or $MAXATTN_CACHE): a killed command goes
    on where it was. With a --target nothing is timed or kept, and the kernels are listed. With
    --offline a TPU's sizes are ranked by the schedules that libtpu makes of their kernels, and kept
    as estimated.
    """
    _config(parser)
    _shape(parser)
    _machine(parser)
    passes = parser.add_mutually_exclusive_group().add_argument
    train = "time forward and backward together, and not forward alone"
    passes("--train", action="store_true", help=train)
    passes("--forward", action="store_true", help="time the forward alone")
    what = parser.add_mutually_exclusive_group().add_argument
    kernels = "time the kernels that auto chooses among; on GPUs and CPUs the default under auto"
    what("--kernels", action="store_true", help=kernels)
    what("--sizes", action="store_true", help="time the sizes of the kernel that runs")
    add, limit = parser.add_argument, "sizes to time for each shape; default 24"
    add("--limit", type=int, default=24, metavar="N", help=limit)
    add("--again", action="store_true", help="time anew what was measured before")
    offline = "rank a TPU's sizes by the schedules that libtpu makes, without a TPU; needs --target"
    add("--offline", action="store_true", help=offline)
    limit = "with --offline: seconds a compile; default 120"
    add("--time-limit", type=float, default=120.0, metavar="S", help=limit)


def convert(parser: Parser) -> None:
    """Read another program's YAML and print ours.

      maxattn convert base_wan_14b.yml > attention.yml
      maxattn convert longlive_inference.yaml > stream.yml
      maxattn check --maxdiffusion base_wan_14b.yml --shape wan-14b-720p --target "TPU v6e"

    Of MaxDiffusion it takes the keys of attention and mesh; of Self-Forcing, LongLive and their kin
    what they say of blocks, window, sink and steps, as the section rollout. Comments say what was
    read otherwise than it was written, and what was left out.
    """
    parser.add_argument("file", metavar="FILE", help="a YAML of MaxDiffusion, Self-Forcing, ...")
    overrides = {"nargs": "*", "default": [], "metavar": "key=value"}
    parser.add_argument("overrides", **overrides, help="in our names")


def bench(parser: Parser) -> None:
    """Measure attention on this machine: every kernel that can run, both passes, and auto.

      maxattn bench
          the shapes of Wan, SDXL and Flux (small ones on a CPU)
      maxattn bench wan-1.3b-480p sdxl-cross
          named shapes
      maxattn bench --shape 2,4608,4608,24,128 --kernel flash --kernel auto
          B,T,S,N,H[/V][,K]
      maxattn bench --peers
          other libraries beside them, called bare
      maxattn bench wan-14b-480p --mesh context=4
          ring, Ulysses and all-gather beside one device
      maxattn bench wan-1.3b-480p --module
          a whole FlaxAttention, beside its attention and its matmuls
      maxattn bench --report implementations --pictures out
          tables and pictures: implementations, block-window, layers

    Times are of the device: short calls are compiled together into one program, so that the host
    does not count. GiB are those of one device: arguments, results and temporaries, as the compiler
    reports them.
    """
    add, several = parser.add_argument, {"action": "append", "default": []}
    add("shapes", nargs="*", metavar="NAME", help=f"one of {', '.join(KNOWN_SHAPES)}")
    add("--shape", **several, metavar="B,T,S,N,H", help="a shape without a name")
    add("--kernel", **several, metavar="KERNEL", help="measure this one (and others)")
    add("--peers", action="store_true", help="other libraries too: cuDNN, TransformerEngine, ...")
    add("--module", action="store_true", help="a whole FlaxAttention beside its parts")
    dtype = "of the module's parameters (default float32)"
    add("--param-dtype", default="float32", metavar="DTYPE", help=dtype)
    add("--report", **several, choices=REPORTS, help="measure and write one of the reports")
    mesh = "spread over devices: data, context, tensor"
    add("--mesh", **several, metavar="AXIS=N", help=mesh)
    strategy = "with --mesh (default: the first three)"
    add("--strategy", **several, choices=STRATEGIES, help=strategy)
    option = "with --mesh or --module: of XLA's compiler"
    add("--option", **several, metavar="NAME=VALUE", help=option)
    add("--pictures", type=Path, metavar="FOLDER", help="draw the reports there, as NAME.png")
    add("--json", type=Path, metavar="FILE", help="write the measurements")
    seconds = "for one measurement, about (default 0.5)"
    add("--seconds", type=float, default=0.5, help=seconds)


OPTIONS: dict[str, Callable[[Parser], None]] = {
    each.__name__: each for each in (explain, check, compile, tune, convert, bench)
}


# ---- options of several commands -----------------------------------------------------------------


def _config(parser: Parser) -> None:
    config = "a YAML file, such as configs/wan_14b.yml, or the name of a shape: wan-14b-720p"
    overrides = "attention=ring ici_context_parallelism=4 ..."
    parser.add_argument("config", nargs="?", default="", metavar="CONFIG", help=config)
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=overrides)


def _shape(parser: Parser) -> None:
    names = ", ".join(KNOWN_SHAPES)
    shape = f"may stand several times; default the shapes of the file's model; names: {names}"
    mask = (
        "full, causal, window:LEFT,RIGHT, block-window:BLOCK,WINDOW, block-causal:N, rectangle:"
        "Q_START,Q_STOP,KV_START,KV_STOP[,Q_START,...] (queries that see keys; one or more), "
        "segments:LENGTH,LENGTH,... (known when traced), segment-ids:LENGTH,LENGTH,... (an array), "
        "lengths:KEYS,KEYS,... (an array, of each batch row), "
        "video:FRAMES,TOKENS[,PER_BLOCK[,WINDOW[,SINK]]], "
        "teacher:... (the same numbers, of a clean video and the noisy one), joined by + (and)"
    )
    add = parser.add_argument
    add("--shape", action="append", default=[], metavar="NAME|B,T,S,N,H[/V][,K]", help=shape)
    add("--role", choices=("self", "cross"), help="default self where T = S, else cross")
    add("--dtype", help="of q, k and v: bf16 (default), f16 or f32")
    add("--batch", type=int, help="B in place of the shape's")
    add("--mask", help=mask)


def _machine(parser: Parser) -> None:
    versions = ", ".join(f"{name}={version}" for name, (_, version) in EXTRAS.items())
    others = ", ".join(PACKAGES[len(EXTRAS) :])
    package = f"a package that the named target has: {versions}, {others}"
    target = "v5p, GB200, RTX 5090, cpu, ...; v5p:2x2x1 is so many chips too; default this machine"
    mesh = "context=4,fsdp=2; default the parallelisms of the config"
    devices = "how many there are, for an ici_*_parallelism of -1"
    add = parser.add_argument
    add("--target", help=target)
    several = {"action": "append", "default": []}
    add("--with", **several, dest="packages", metavar="PACKAGE[=VERSION]", help=package)
    add("--mesh", **several, help=mesh)
    add("--devices", type=int, help=devices)
