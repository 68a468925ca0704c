"""Time the legal block sizes of a model's own shapes on this machine, keep the fastest, and print
the YAML.

  maxattn tune configs/wan_14b.yml --shape wan-14b-480p --shape wan-cross --limit 40
  maxattn tune attention=dot_product use_memory_efficient_attention=true --shape 1,4096,4096,8,64
  maxattn tune configs/wan_14b.yml --shape wan-14b-720p --target "TPU v6e"

Each measurement is kept at once in ~/.cache/maxattn (or $MAXATTN_CACHE): a killed command goes on
where it was. Plans on this machine then take the fastest sizes where the config sets none. With a
--target that is not this machine, nothing is timed or kept: the sizes are ranked by what they
compute, padding included, and by their steps: an estimate.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from maxattn.call import Call
from maxattn.config import AttentionConfig
from maxattn.config.write import yaml_of
from maxattn.errors import InputError
from maxattn.kernels import KERNELS
from maxattn.plan import Plan, plan
from maxattn.target import Target
from maxattn.tools.cli import common
from maxattn.tools.cli.progress import say, say_where
from maxattn.tools.tune import store
from maxattn.tools.tune.candidates import Candidate, candidates
from maxattn.tools.writable import check_writable
from maxattn.tuned import (
    BLOCKS,
    CHUNKS,
    Tuned,
    cache_path,
    in_ms,
    key_of,
    versions_of,
    winners,
    with_sizes,
)

HELP = "time block sizes on this machine and keep the fastest"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    common.config_arguments(parser)
    common.shape_arguments(parser)
    common.machine_arguments(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--train",
        action="store_true",
        help="time forward and backward together, and not forward alone",
    )
    what.add_argument("--forward", action="store_true", help="time the forward alone")
    parser.add_argument(
        "--limit",
        type=int,
        default=24,
        metavar="N",
        help="sizes to time for each shape; default 24",
    )
    parser.add_argument("--again", action="store_true", help="time anew what was measured before")


def run(args: argparse.Namespace) -> int:
    """Tune each shape."""
    if args.limit < 1:
        raise InputError("limit", args.limit, "at least one candidate is timed", "write --limit 24")
    source = common.read_source(args)
    mesh, target = common.mesh_of(args, source.config), common.target_of(args, source.config)
    for number, shape in enumerate(common.shapes_of(args, source)):
        made = plan(shape.call(), source.config, mesh, replace(target, tuned=()))
        local = made.context.local_call(made.padded_call)
        print(
            ("\n" if number else "")
            + f"{shape.name}: {made.kernel.name}, one device's {_local(local)}",
            flush=True,
        )
        _tune(args, source.config, made, local, target)
    return 0


def _local(call: Call) -> str:
    return f"{call.role}-attention {call.shape_text}" + (
        "" if call.mask.is_full else f" {call.mask}"
    )


def _tune(
    args: argparse.Namespace, config: AttentionConfig, made: Plan, local: Call, target: Target
) -> None:
    kernel = made.kernel.name
    if kernel not in (*BLOCKS, CHUNKS) or (kernel in BLOCKS and target.platform == "gpu"):
        print(f"  {kernel} has no sizes to tune on {target.device_kind}")
        return
    as_computed = replace(local, dtype="float32") if config.float32_qk_product else local
    found = candidates(kernel, as_computed, target, not args.forward, args.limit)
    # Only the blockwise kernel is more than an interpreter on a CPU.
    here = (
        not args.target
        and target == Target.here()
        and (kernel == CHUNKS or target.platform != "cpu")
    )
    if here:
        _timed(args, config, kernel, local, target, found)
    else:
        _ranked(config, kernel, found, target)


# ---- without the device --------------------------------------------------------------------------


def _ranked(
    config: AttentionConfig, kernel: str, found: tuple[Candidate, ...], target: Target
) -> None:
    print(
        f"  an estimate: {target.device_kind} is not here (or is a CPU's interpreter), so nothing"
        " is timed or kept"
    )
    print(f"  {'of T x S':>8}  {'steps':>7}  sizes")
    for candidate in sorted(found, key=lambda c: c.cost):
        mark = "  (runs where nothing is set)" if candidate is found[0] else ""
        print(f"  {candidate.share:8.2%}  {candidate.steps:7}  {candidate}{mark}")
    best = min(found, key=lambda c: c.cost)
    print(f"  least work and fewest steps together:\n{_yaml(config, kernel, best.sizes)}")


def _yaml(config: AttentionConfig, kernel: str, sizes: Any) -> str:
    """Write the lines to paste."""
    return "\n".join(
        f"    {line}" for line in yaml_of(with_sizes(AttentionConfig(), kernel, sizes)).splitlines()
    )


# ---- on the device -------------------------------------------------------------------------------


def _timed(
    args: argparse.Namespace,
    config: AttentionConfig,
    kernel: str,
    local: Call,
    target: Target,
    found: tuple[Candidate, ...],
) -> None:
    path = cache_path()
    check_writable("MAXATTN_CACHE", path)
    print(f"  {len(found)} candidates; measurements in {path}", flush=True)
    say_where(f"{kernel}, a candidate after the other,", target)
    for number, candidate in enumerate(found, start=1):
        say(f"  {number}/{len(found)}  {candidate}")
        measured, old = _measured(args, config, kernel, local, target, candidate)
        times = ", ".join(
            f"{name} {in_ms(measured[key])}"
            for name, key in _TIMES.items()
            if measured[key] is not None
        )
        words = times or f"does not run: {measured['error']}"
        print(
            f"  {number:>3}/{len(found)}  {words:<40} "
            f" {candidate}{'  (measured before)' if old else ''}",
            flush=True,
        )
    _say_winner(config, kernel, local, target, found[0])


_TIMES = {"forward": "forward_ms", "forward and backward": "training_ms"}


def _measured(
    args: argparse.Namespace,
    config: AttentionConfig,
    kernel: str,
    local: Call,
    target: Target,
    candidate: Candidate,
) -> tuple[dict[str, Any], bool]:
    """Return a measurement, and whether it was there already."""
    identity = _identity(kernel, local, target, candidate)
    wanted = [
        key
        for key, skipped in (("forward_ms", args.train), ("training_ms", args.forward))
        if not skipped
    ]
    old = store.find(cache_path(), identity)
    if old and not args.again and (old["error"] or all(old[key] is not None for key in wanted)):
        return old, True
    measured = (
        identity
        | {"forward_ms": None, "training_ms": None, "error": ""}
        | (old or {})
        | {"error": ""}
    )
    built = KERNELS[kernel].build(local, with_sizes(config, kernel, candidate.sizes), target)
    try:
        for key in wanted:
            measured[key] = _time(built, local, key == "training_ms")
    except Exception as error:  # the compiler's or the device's; the next candidate may run
        first = (str(error).strip().splitlines() or [""])[0]
        measured["error"] = f"{type(error).__name__}: {first[:200]}"
    store.add(cache_path(), measured)
    return measured, False


def _time(built: Any, local: Call, training: bool) -> float:
    from maxattn.tools.tune.measure import milliseconds

    return milliseconds(built, local, training)


def _identity(kernel: str, local: Call, target: Target, candidate: Candidate) -> dict[str, Any]:
    return {
        "device_kind": target.device_kind,
        "versions": versions_of(kernel, target.packages),
        "kernel": kernel,
        "call": key_of(local),
        "sizes": dict(candidate.sizes),
    }


def _say_winner(
    config: AttentionConfig, kernel: str, local: Call, target: Target, default: Candidate
) -> None:
    from maxattn.tuned import read

    path = cache_path()
    table = winners(read(path), target.device_kind, target.packages, str(path))
    best = next((t for t in table if t.kernel == kernel and t.call == key_of(local)), None)
    if best is None:
        print("  none of them runs")
        return
    before = store.find(path, _identity(kernel, local, target, default))
    print(f"  fastest {best}{_gain(best, before)}")
    print(
        "  plans on this machine take it where the config sets none; to set"
        f" it:\n{_yaml(config, kernel, best.sizes)}"
    )


def _gain(best: Tuned, before: dict[str, Any] | None) -> str:
    time = before["training_ms" if best.training else "forward_ms"] if before else None
    return (
        f", {time / best.milliseconds:.2f} times as fast as {in_ms(time)} where nothing is set"
        if time
        else ""
    )
