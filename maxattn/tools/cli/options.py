"""The options of each command, and the text of its --help. Nothing here imports jax.

A function has the name of its command; its docstring is the text above the options.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path

from maxattn.jax_private.versions import AITER, CUDNN
from maxattn.kernels.table import EXTRAS
from maxattn.tools.known_models import KNOWN_SHAPES, MODELS

Parser = argparse.ArgumentParser
STRATEGIES = ("ring", "ulysses", "all_gather", "ulysses_ring")
REPORTS = ("implementations", "block-window", "layers")
PACKAGES = (*EXTRAS, *CUDNN, AITER)  # packages beside jax that the choice of a kernel can depend on
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
    r"""Print what would run for each shape, and why: kernel, parallelism, block sizes, transfers.

      maxattn explain configs/wan_14b.yml --shape wan-14b-720p --target "TPU v5p" --mesh context=4
      maxattn explain attention=ring --shape 1,32760,32760,12,128 --target "NVIDIA H200" \
          --mesh context=8
      maxattn explain --stream wan-1.3b-480p,frames=3,window=7,sink=0 --target H200

    Nothing is computed, and no device is needed.
    """
    _common(parser)
    stream = (
        f"explain a video that is made block by block, such as {STREAM_EXAMPLE},sink=0. NAME is one"
        f" of {', '.join(MODELS)}; another model needs tokens= (per frame), heads=, head_dim=,"
        " layers= and kv_heads=. Keys: frames= of a block, window= in blocks or all, sink= in"
        " frames, first_frame_alone, steps= of a block (default 4), clean_pass=false, length= of"
        " the video in frames, context=heads or tokens. The default is CONFIG's section rollout"
    )
    parser.add_argument("--stream", metavar="NAME,key=value,...", help=stream)
    why = "print how `context_parallel: auto` compares the strategies"
    parser.add_argument("--why", action="store_true", help=why)


def check(parser: Parser) -> None:
    r"""Validate a config; print what it sets, the plan of each shape, its memory, and advice.

      maxattn check configs/wan_14b.yml --shape wan-14b-720p --shape wan-14b-cross \
          --target "TPU v5p" --devices 8 --batch 2
      maxattn check --maxdiffusion base_wan_14b.yml --shape wan-14b-720p --target "TPU v6e"

    All wrong keys and values are reported at once, with file and line. The exit status is 1 if
    a key or value is wrong, and if a shape cannot run or does not fit.
    """
    _common(parser)
    lengths = (
        "real keys of each batch row, such as 300,512, or 300 for all. If mask_padding_tokens"
        " is false, advice names the share of padding that is attended to"
    )
    switch = partial(parser.add_argument, action="store_true")
    switch("--maxdiffusion", help="CONFIG is a MaxDiffusion YAML")
    switch("--all", help="print every key, also keys at their default")
    switch("--inference", help="plan the forward alone")
    parser.add_argument("--lengths", metavar="KEYS,...", help=lengths)


def compile(parser: Parser) -> None:
    r"""Compile attention for a TPU with the TPU's own compiler; check that it fits in memory.

      maxattn compile configs/wan_14b.yml ici_fsdp_parallelism=1 --target v5p:2x2x1 \
          --shape wan-14b-720p
      maxattn compile attention=ring ici_context_parallelism=4 --target v6e:2x2 \
          --shape wan-14b-480p --train --module
      maxattn compile attention=flash --target v6e --devices 1 --shape wan-1.3b-480p --estimate

    Needs libtpu (pip install "maxattn[tpu]"), and no TPU. Each shape is compiled in a process of
    its own. With --estimate each Pallas kernel, and the whole program, is priced by the schedule
    that libtpu makes; nothing runs. With --block 13824 --layers 40 as well, a model's step is
    predicted from one of its blocks. The exit status is 1 if a shape does not compile or does not
    fit, or if its estimate is refused.
    """
    _config(parser)
    _shape(parser)
    target = "a TPU and its chips along each side: v5p:2x2x1, v6e:2x2, tpu7x:2x2x1; v5p is one host"
    module = "a whole FlaxAttention or CrossAttention as in Wan, with projections, norms and RoPE"
    block = "a whole transformer block as in Wan, with a feed-forward of this width"
    file = (
        "compile FUNCTION(q, k, v, config) of a file in place of maxattn's attention, on one"
        " device: arrays [B, T, N, H]; it gets every key, and --mask only counts its tiles"
    )
    layout = "arrays of that function: heads for [B, T, N, H] (default), flat for [B, T, N*H]"
    visited = (
        "tiles that it visits for one head, without and with a test of the mask; default counted"
        " from --mask and the blocks of its kernel"
    )
    add, switch = parser.add_argument, partial(parser.add_argument, action="store_true")
    add("--target", required=True, help=target)
    add("--devices", type=int, metavar="N", help="use the first N devices of the topology")
    add("--slices", type=int, default=1, metavar="N", help="N topologies, for dcn_*_parallelism")
    switch("--train", help="forward and backward; default forward")
    switch("--module", help=module)
    add("--block", type=int, default=0, metavar="N", help=block)
    add("--layers", type=int, default=1, metavar="N", help="with --estimate: layers of a model")
    switch("--estimate", help="estimate times by libtpu's schedule")
    add("--kernel-file", default="", metavar="PATH:FUNCTION", help=file)
    add("--layout", choices=("heads", "flat"), default="heads", help=layout)
    add("--visited", default="", metavar="FULL,MASKED", help=visited)
    limit = "most seconds for each compile; default 600"
    add("--time-limit", type=float, default=600.0, metavar="S", help=limit)
    switch("--json", help="print everything as JSON")


def tune(parser: Parser) -> None:
    """Time kernels, or the sizes of one, for a model's calls on this machine; keep the fastest.

      maxattn tune configs/wan_14b.yml
      maxattn tune wan-14b-480p wan-14b-cross
      maxattn tune attention=auto --shape 64,256,256,16,72 --forward
      maxattn tune attention=flash --shape wan-14b-720p --target v6e --offline

    On GPUs and CPUs, under `attention: auto`, every kernel that can run the call is timed. On TPUs,
    and if the config names a kernel, that kernel's sizes are timed. Plans on this machine then take
    the fastest, unless the config names a kernel or sets sizes.

    Each measurement is kept at once in ~/.cache/maxattn (or $MAXATTN_CACHE), so that a killed
    command continues when it is run again. With a --target nothing is timed or kept, and the
    kernels are listed. With --offline a TPU's sizes are ranked by libtpu's schedules of the
    kernels, and kept as estimates.
    """
    _common(parser)
    passes = parser.add_mutually_exclusive_group().add_argument
    passes("--train", action="store_true", help="time sizes for forward and backward together only")
    passes("--forward", action="store_true", help="time the forward alone")
    what = parser.add_mutually_exclusive_group().add_argument
    what("--kernels", action="store_true", help="time the kernels that auto chooses among")
    what("--sizes", action="store_true", help="time the sizes of the kernel that runs")
    add, switch = parser.add_argument, partial(parser.add_argument, action="store_true")
    limit = "most sizes to time for each shape; default 24"
    add("--limit", type=int, default=24, metavar="N", help=limit)
    switch("--again", help="repeat kept measurements")
    offline = "rank a TPU's sizes without a TPU; needs --target and libtpu"
    switch("--offline", help=offline)
    limit = "with --offline: most seconds for each compile; default 120"
    add("--time-limit", type=float, default=120.0, metavar="S", help=limit)


def convert(parser: Parser) -> None:
    """Read another program's YAML and print maxattn's.

      maxattn convert base_wan_14b.yml > attention.yml
      maxattn convert longlive_inference.yaml > stream.yml

    From MaxDiffusion the keys of attention and of the mesh are taken. From Self-Forcing and
    LongLive, blocks, window, sink and steps become the section rollout. Comments list the
    settings that were changed or left out.
    """
    parser.add_argument("file", metavar="FILE", help="a YAML of MaxDiffusion, Self-Forcing, ...")
    overrides = {"nargs": "*", "default": [], "metavar": "key=value"}
    parser.add_argument("overrides", **overrides, help="settings to change, by maxattn's names")


def config(parser: Parser) -> None:
    """List every key of a config with its default and its meaning, or explain the named keys.

    maxattn config
    maxattn config attention fallback
    maxattn config flash_block_sizes
    """
    parser.add_argument("keys", nargs="*", metavar="KEY", help="a key, or a section: all its keys")


def completion(parser: Parser) -> None:
    """Print a script with which a shell completes commands, options, keys, values and shapes.

      maxattn completion bash > ~/.local/share/bash-completion/completions/maxattn
      maxattn completion zsh > ~/.maxattn.zsh     (then in .zshrc: source ~/.maxattn.zsh)
      maxattn completion fish > ~/.config/fish/completions/maxattn.fish

    Print it again after an update of maxattn.
    """
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")


def bench(parser: Parser) -> None:
    """Measure attention on this machine: every kernel that can run, both passes, and auto.

      maxattn bench
          the shapes of Wan, SDXL and Flux (small ones on a CPU)
      maxattn bench wan-1.3b-480p sdxl-cross
          named shapes
      maxattn bench --shape 2,4608,4608,24,128 --kernel flash --kernel auto
          B,T,S,N,H[/V][,K]
      maxattn bench --peers
          other libraries too, called directly
      maxattn bench wan-14b-480p --mesh context=4
          ring, Ulysses and all-gather beside one device
      maxattn bench wan-1.3b-480p --module
          a whole FlaxAttention, beside its attention and its matmuls
      maxattn bench --report implementations --pictures out
          tables and pictures: implementations, block-window, layers

    Times are of the device: short calls are compiled together into one program, so that the host's
    launches do not count. GiB are per device: arguments, results and temporaries, as the compiler
    reports them.
    """
    add, several = parser.add_argument, {"action": "append", "default": []}
    switch = partial(parser.add_argument, action="store_true")
    add("shapes", nargs="*", metavar="NAME", help=f"one of {', '.join(KNOWN_SHAPES)}")
    add("--shape", **several, metavar="B,T,S,N,H", help="a shape by its sizes; repeatable")
    add("--kernel", **several, metavar="KERNEL", help="measure this kernel; repeatable")
    switch("--peers", help="measure other libraries too: cuDNN, TransformerEngine, ...")
    switch("--module", help="measure a whole FlaxAttention and its parts")
    dtype = "dtype of the module's parameters; default float32"
    add("--param-dtype", default="float32", metavar="DTYPE", help=dtype)
    add("--report", **several, choices=REPORTS, help="measure and write one of the reports")
    add("--mesh", **several, metavar="AXIS=N", help="mesh over devices: data, context, tensor")
    strategy = "with --mesh; default the first three"
    add("--strategy", **several, choices=STRATEGIES, help=strategy)
    option = "an option of XLA's compiler, with --mesh or --module"
    add("--option", **several, metavar="NAME=VALUE", help=option)
    add("--pictures", type=Path, metavar="FOLDER", help="draw the reports there, as NAME.png")
    add("--json", type=Path, metavar="FILE", help="write the measurements")
    add("--seconds", type=float, default=0.5, help="seconds per measurement; default 0.5")


def audit(parser: Parser) -> None:
    """Measure what a model's own activations do to attention, by layer and head; name the unsafe.

      maxattn audit --call my_model:audited --picture audit.png
          audited() returns (model, inputs): a module or function, and its arguments
      maxattn audit configs/wan_14b.yml attention=flash --call my_model:audited
          audited(config) gets the settings
      maxattn audit --tensors calls.safetensors --grid 21,30,52 --by-head
          q, k and v that maxattn.auditing.save_calls wrote
      maxattn audit --call my_model:audited --light --queries 32 --calls 4 --cost
          a sample, and how much longer a run takes with its measures in it

    The model runs once. Each call is measured on its own q, k and v: scores, norms, offsets,
    entropy, masses, and for each kernel that can run here the error against float32, time, memory.
    """
    _config(parser)
    parser.set_defaults(shape=[])
    add, switch = parser.add_argument, partial(parser.add_argument, action="store_true")
    add("--call", default="", metavar="MODULE:FUNCTION", help="what is run and audited")
    add("--tensors", type=Path, metavar="FILE", help="a safetensors file of q, k and v")
    add("--mask", help="with --tensors: the mask of every call, such as causal; see explain")
    grid = "the grid of the last tokens; default read from rotary tables"
    add("--grid", metavar="FRAMES,HEIGHT,WIDTH", help=grid)
    add("--queries", default="64", metavar="N|all", help="queries of a call to sample; default 64")
    add("--heads", type=int, metavar="N", help="heads of a call to sample; default all")
    add("--calls", type=int, metavar="N", help="calls, such as layers, to sample; default all")
    add("--seed", type=int, default=0, metavar="N", help="seeds the samples; default 0")
    several = {"action": "append", "default": [], "metavar": "KERNEL"}
    add("--kernel", **several, help="compare this kernel; repeatable; default all that can run")
    switch("--light", help="compute no outputs: no errors of 8 bits and of kernels")
    switch("--cost", help="time a run alone, and with the measures in it")
    switch("--by-head", help="print a line for each head")
    add("--picture", type=Path, metavar="FILE", help="draw measures by layer and head, as a PNG")
    add("--json", type=Path, metavar="FILE", help="write what is found")
    seconds = "seconds to time each kernel; default 0.2, 0 for no times"
    add("--seconds", type=float, default=0.2, metavar="S", help=seconds)


OPTIONS: dict[str, Callable[[Parser], None]] = {
    each.__name__: each
    for each in (explain, check, compile, tune, convert, config, completion, bench, audit)
}


# ---- options of several commands -----------------------------------------------------------------


def _common(parser: Parser) -> None:
    _config(parser)
    _shape(parser)
    _machine(parser)


def _config(parser: Parser) -> None:
    config = "a YAML file, such as configs/wan_14b.yml, or the name of a shape: wan-14b-720p"
    overrides = "settings to change: attention=ring ici_context_parallelism=4 ..."
    parser.add_argument("config", nargs="?", default="", metavar="CONFIG", help=config)
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=overrides)


def _shape(parser: Parser) -> None:
    shape = (
        "batch, queries, keys, heads, head dim [/ of values] [, key heads], or a name; repeatable;"
        f" default the shapes of the file's model. Names: {', '.join(KNOWN_SHAPES)}"
    )
    mask = (
        "full, causal, window:LEFT,RIGHT, block-window:BLOCK,WINDOW, block-causal:BLOCK,"
        " rectangle:Q_START,Q_STOP,KV_START,KV_STOP[,...], segments:LENGTH,... (known when traced),"
        " segment-ids:LENGTH,... (an array), lengths:KEYS,... (an array, of each batch row),"
        " video:FRAMES,TOKENS[,PER_BLOCK[,WINDOW[,SINK]]], teacher:... (the same numbers, of a"
        " clean video and the noisy one); several are joined by + (and)"
    )
    add = parser.add_argument
    add("--shape", action="append", default=[], metavar="NAME|B,T,S,N,H[/V][,K]", help=shape)
    add("--role", choices=("self", "cross"), help="default self if T = S, else cross")
    add("--dtype", help="dtype of q, k and v: bf16 (default), f16 or f32")
    add("--batch", type=int, metavar="B", help="batch size, in place of the shape's")
    add("--mask", help=mask)


def _machine(parser: Parser) -> None:
    versions = ", ".join(f"{name}={version}" for name, (_, version) in EXTRAS.items())
    others = ", ".join(PACKAGES[len(EXTRAS) :])
    package = f"a package on the named target: {versions}, {others}"
    target = "v5p, GB200, RTX 5090, cpu, ..., or v5p:2x2x1 with its chips; default this machine"
    add, several = parser.add_argument, {"action": "append", "default": []}
    add("--target", help=target)
    add("--with", **several, dest="packages", metavar="PACKAGE[=VERSION]", help=package)
    mesh = "sizes of axes, such as context=4,fsdp=2; default the parallelisms of the config"
    add("--mesh", **several, metavar="AXIS=N", help=mesh)
    devices = "number of devices, if an ici_*_parallelism is -1"
    add("--devices", type=int, metavar="N", help=devices)
