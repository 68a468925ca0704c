"""The machine on a command line: --target, --with, --mesh and --devices."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from maxattn.config import AttentionConfig
from maxattn.config.errors import plain
from maxattn.config.numbers import MOST_DEVICES, whole, whole_in
from maxattn.config.target_names import read_target
from maxattn.errors import ConfigError, InputError, MeshError, did_you_mean
from maxattn.jax_private.aiter import AITER
from maxattn.jax_private.versions import CUDNN
from maxattn.kernels.table import EXTRAS
from maxattn.target import Target

# What a kernel's choice can depend on beside jax.
NAMED = (*EXTRAS, *CUDNN, AITER)


def machine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the machine that plans are for."""
    add = parser.add_argument
    known = ", ".join(f"{name}={version}" for name, (_, version) in EXTRAS.items())
    package = f"a package that the named target has: {known}, {', '.join(NAMED[len(EXTRAS) :])}"
    mesh = "context=4,fsdp=2; default the parallelisms of the config"
    devices = "how many there are, for an ici_*_parallelism of -1"
    target = "v5p, GB200, RTX 5090, cpu, ...; v5p:2x2x1 is so many chips too; default this machine"
    add("--target", help=target)
    several: dict[str, Any] = {"action": "append", "default": []}
    add("--with", **several, dest="packages", metavar="PACKAGE[=VERSION]", help=package)
    add("--mesh", **several, help=mesh)
    add("--devices", type=int, help=devices)


def target_of(args: argparse.Namespace, config: AttentionConfig) -> Target:
    """Return the named target, else the config's platform, else this machine.

    A name touches no backend.

    Raises:
        ConfigError: for a name that is not known.
    """
    packages = packages_of(args)
    if not args.target:
        from maxattn.decide import default_target

        return default_target(config)
    return Target.named(args.target, packages)


def packages_of(args: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    """Return what --with lists as (package, version), "?" for a version that is not written.

    Raises:
        ConfigError: for packages without a target that is named.
        InputError: for a package that no kernel calls.
    """
    if not args.target and args.packages:
        rule = "packages are listed for a target that is named; this machine's are looked up"
        raise ConfigError("--with", " ".join(args.packages), rule, 'add --target "TPU v5p"')
    return tuple(_package(text) for text in args.packages)


def _package(text: str) -> tuple[str, str]:
    name, _, version = text.replace("==", "=").partition("=")
    if name not in NAMED:
        rule = f"the packages that plans ask for are {', '.join(NAMED)}"
        remedy = did_you_mean(name, NAMED) or "name one of them, or leave it out"
        raise InputError("--with", text, rule, remedy)
    return name, version or "?"


# ---- meshes --------------------------------------------------------------------------------------


def mesh_of(args: argparse.Namespace, config: AttentionConfig) -> dict[str, int]:
    """Return the axis sizes that --mesh names, else those of the config.

    An open size, -1, is what --devices leaves, or the chips of the target; else 1.

    Raises:
        MeshError: for a wrong spelling, no device, or devices that do not divide or are not those
            of --mesh.
    """
    if args.devices is not None:
        _check_count(args.devices)
    there = read_target(args.target).devices if args.target else None
    if not args.mesh:
        return _mesh_of_config(config, _used(args, there))
    sizes = read_mesh(args.mesh)
    if args.devices is not None and prod(sizes.values()) != args.devices:
        rule = f"--mesh {','.join(args.mesh)} says how many there are, {prod(sizes.values())}"
        remedy = "leave one of them out: --devices is for the config's own mesh"
        raise MeshError("--devices", args.devices, rule, remedy)
    if there is not None and prod(sizes.values()) > there:
        rule = f"{args.target} has {there} devices, and these are {prod(sizes.values())}"
        raise MeshError("--mesh", ",".join(args.mesh), rule, "name a larger topology")
    return sizes


def _used(args: argparse.Namespace, there: int | None) -> int | None:
    """Return the devices to use: --devices of those that the target has, else all of them."""
    if there is None or args.devices is None:
        return there if args.devices is None else args.devices
    if args.devices > there:
        rule = f"{args.target} has {there} devices"
        raise MeshError("--devices", args.devices, rule, f"write --devices {there}, or more chips")
    return args.devices


def _check_count(devices: int) -> None:
    if whole(devices, most=MOST_DEVICES) is not None:
        return
    rule, remedy = f"there are at most {MOST_DEVICES:,} devices", "ask for fewer"
    if devices < 1:
        rule, remedy = "there is at least one device", "write --devices 1 or more"
    raise MeshError("--devices", plain(devices), rule, remedy)


def read_mesh(words: Sequence[str]) -> dict[str, int]:
    """Read axes: `context=4,fsdp=2`, in one word or several.

    Raises:
        MeshError: for a wrong spelling, or an axis that is named twice.
    """
    sizes: dict[str, int] = {}
    for part in ",".join(words).replace(" ", ",").split(","):
        if part:
            axis, size = _axis(part, sizes)
            sizes[axis] = size
    return sizes


def _axis(part: str, known: Mapping[str, int]) -> tuple[str, int]:
    axis, equals, size = (word.strip() for word in part.partition("="))
    number = whole_in(size, least=0, most=MOST_DEVICES)
    if not equals or number is None:
        rule = "it is axis=size, joined by commas"
        rule = f"an axis has at most {MOST_DEVICES:,} devices" if size.isdecimal() else rule
        raise MeshError("mesh", plain(part), rule, "write --mesh context=4,fsdp=2")
    if axis in known:
        rule = f"the axis {axis} is named twice"
        raise MeshError("mesh", part, rule, f"leave {axis}={known[axis]} or {part} out")
    return axis, number


def _mesh_of_config(config: AttentionConfig, devices: int | None) -> dict[str, int]:
    sizes = config.axis_parallelism()
    fixed = prod(n for pair in sizes.values() for n in pair if n > 0)
    if devices is not None:
        is_open = any(ici == -1 for ici, _ in sizes.values())
        _check_devices(devices, fixed, is_open)
    rest = (devices or fixed) // fixed
    # Slices: an open dcn axis is one slice here.
    return {axis: (rest if ici == -1 else ici) * max(dcn, 1) for axis, (ici, dcn) in sizes.items()}


def _check_devices(devices: int, fixed: int, is_open: bool) -> None:
    product = f"the config's parallelisms multiply to {fixed}"
    if devices % fixed:
        least = max(1, devices // fixed) * fixed
        remedy = f"write --devices {least}, or change an ici_*_parallelism"
        raise MeshError("devices", devices, f"{product}, which must divide the devices", remedy)
    if devices > fixed and not is_open:
        remedy = f"write --devices {fixed}, or set one ici_*_parallelism to -1"
        raise MeshError("devices", devices, f"{product}, and no ici_*_parallelism is -1", remedy)
