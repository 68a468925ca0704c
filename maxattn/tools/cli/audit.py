"""`maxattn audit`: measure attention on a model's own activations, by layer and head."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
from importlib import import_module
from re import split
from typing import Any

from maxattn.config import AttentionConfig
from maxattn.config.errors import plain
from maxattn.config.numbers import whole_in
from maxattn.errors import InputError
from maxattn.tools.cli.inputs import read_source
from maxattn.tools.cli.masks import read_mask
from maxattn.tools.writable import check_writable, write_whole

WRITTEN = "write it with maxattn.auditing.save_calls"


def run(args: argparse.Namespace) -> int:
    """Audit a program; print, draw and write the result."""
    if bool(args.tensors) == bool(args.call):
        given = "both given" if args.call else "neither given"
        rule, remedy = "an audit needs one of --tensors and --call", "give one of them"
        raise InputError("--tensors, --call", given, rule, remedy)
    for option in ("json", "picture"):
        if path := getattr(args, option):
            check_writable(f"--{option}", path)
    config, grid = read_source(args).config, _grid(args.grid)
    if args.shape:
        rule = "an audit needs your own activations, not a shape"
        raise InputError("CONFIG", args.shape[0], rule, "leave the shape out")
    if args.mask and args.call:
        rule = "a model has its own masks"
        raise InputError("--mask", args.mask, rule, "leave it out, or audit --tensors")
    from maxattn.auditing import AuditSample, audited, cost_of, trace

    queries = None if args.queries == "all" else whole_in(args.queries)
    if queries is None and args.queries != "all":
        rule = "it must be a whole number of at least 1, or all"
        raise InputError("--queries", plain(args.queries), rule, "write --queries 64")
    sample = AuditSample(queries, args.heads, args.calls, args.seed, not args.light)
    what, inputs, names = _of_tensors(args, config) if args.tensors else _of_call(args.call, config)
    positional, named = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    program = trace(what, *positional, **named)
    kernels = args.kernel or None
    found = audited(program, sample, kernels, grid, args.seconds, names)
    print(found.table(args.by_head))
    if args.cost:
        alone, beside = cost_of(program, sample)
        times = f"{1e3 * alone:.2f} ms alone, {1e3 * beside:.2f} ms with the measures in it"
        print(f"\na run takes {times} ({beside / alone - 1:+.1%})")
    if args.json:
        write_whole(args.json, json.dumps(found.to_dict(), indent=1))
    if args.picture:
        found.picture(args.picture)
    return 0


def _grid(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    sizes = [whole_in(part) for part in text.split(",")]
    if len(sizes) not in (2, 3) or None in sizes:
        rule = "it must be FRAMES,HEIGHT,WIDTH or HEIGHT,WIDTH in tokens"
        raise InputError("--grid", plain(text), rule, "write for example --grid 21,30,52")
    return tuple(size for size in sizes if size)


# ---- what is audited -----------------------------------------------------------------------------


def _of_tensors(args: argparse.Namespace, config: AttentionConfig) -> Any:
    """Return the function that attends with every (q, k, v) of a file, its arrays, and names."""
    from safetensors import SafetensorError
    from safetensors.flax import load_file

    from maxattn._attention import attention

    try:
        tensors = load_file(args.tensors)
    except (OSError, SafetensorError) as error:
        rule = f"it must be a safetensors file: {plain(str(error))}"
        raise InputError("--tensors", str(args.tensors), rule, WRITTEN) from None
    found = {key.rpartition(".")[0] for key in tensors}
    parts = {x: split(r"(\d+)", x) for x in found}
    names = sorted(found, key=lambda x: [int(n) if n.isdecimal() else n for n in parts[x]])
    calls = [[tensors.get(f"{name}.{n}".lstrip(".")) for n in "qkv"] for name in names]
    if len(tensors) != 3 * len(names) or any(x is None for call in calls for x in call):
        rule = "it must have NAME.q, NAME.k and NAME.v, or q, k and v"
        raise InputError("--tensors", ", ".join(sorted(tensors)[:6]), rule, WRITTEN)
    mask = None if args.mask is None else read_mask(args.mask)

    def attend(calls: Any) -> Any:
        def one(q: Any, k: Any, v: Any) -> Any:
            role = "self" if q.shape[1] == k.shape[1] else "cross"
            return attention(q, k, v, mask, config=config, role=role)

        return [one(*call) for call in calls]

    return attend, (calls,), [name or "call 1" for name in names]


def _of_call(text: str, config: AttentionConfig) -> Any:
    """Return (model, inputs, no names) of a function `package.module:function`."""
    module, colon, name = text.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        make: Any = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        rule = "it must be package.module:function" + (f": {plain(str(error))}" if colon else "")
        remedy = "name a function that can be imported from this folder"
        raise InputError("--call", plain(text), rule, remedy) from None
    finally:
        sys.path.remove(os.getcwd())
    try:
        takes_config = bool(inspect.signature(make).parameters)
    except (TypeError, ValueError):  # no function, or one without a signature
        rule, remedy = "it must be a function that returns (model, inputs)", "name a function"
        raise InputError("--call", plain(text), rule, remedy) from None
    if config.changed and not takes_config:
        rule = "the function takes no config, so settings cannot change its model"
        changed = ", ".join(sorted(config.changed))
        remedy = "leave the settings out, or take a parameter config"
        raise InputError("CONFIG", changed, rule, remedy)
    made = make(config) if takes_config else make()
    if not isinstance(made, tuple) or len(made) != 2:
        rule = "the function must return (model, inputs)"
        remedy = "return the module, and its arguments as a tuple or a dict"
        raise InputError("--call", type(made).__name__, rule, remedy)
    model, inputs = made
    return model, inputs if isinstance(inputs, tuple | dict) else (inputs,), ()
