"""`audit` measures attention on a model's own activations, by layer and head.

measures.py has what is measured of a call, calls.py finds the calls of a program, kernels.py
compares kernels, unsafe.py has the rules, and report.py the result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache, wraps
from itertools import chain, pairwise
from math import prod
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import jaxpr_as_fun

from maxattn.auditing.calls import Traced, traced
from maxattn.auditing.kernels import Candidate, Cost, candidates, costs_of, errors_of
from maxattn.auditing.measures import AXES, AuditSample, measures_of, reach
from maxattn.auditing.report import Audit, Finding, KernelAudit, LayerAudit
from maxattn.auditing.unsafe import findings
from maxattn.config.numbers import finite, whole
from maxattn.errors import InputError, brief
from maxattn.jax_private.mesh import is_tracer
from maxattn.jax_private.observed import MarkedCall, layer_named
from maxattn.masks import Mask
from maxattn.measuring.timing import TimedFunction, first_line
from maxattn.measuring.timing import measure as timed
from maxattn.rope import Rotary
from maxattn.weights.replacing import replacing

__all__ = ["Audit", "AuditSample", "Finding", "KernelAudit", "LayerAudit", "audit", "save_calls"]

EVERYTHING = AuditSample()


def audit(
    what: Callable[..., Any],
    *inputs: Any,
    sample: AuditSample = EVERYTHING,
    kernels: Sequence[str] | None = None,
    grid: Sequence[int] | None = None,
    seconds: float = 0.2,
    **named: Any,
) -> Audit:
    """Run a model once, and measure every attention call in it by layer and head.

    Calls are found in modules, under `jit`, `nnx.scan`, `lax.scan` and remat, and on a mesh. The
    measures are computed in the traced program. The model, its traces and results stay as they are.

    Args:
        what: a module, or a function that calls attention, such as `ma.attention`.
        inputs, named: its arguments.
        sample: the queries, heads and calls that are measured; default 64 queries of each call.
        kernels: kernels to compare; default all that can run here; () for none.
        grid: (frames, height, width) or (height, width) of the last tokens; default read from
            tables of `rope_3d` and `rope_2d`.
        seconds: about how long each kernel is timed; 0 for no times.

    Returns:
        An `Audit`, which prints as a table.

    Raises:
        InputError: no attention is called, the grid does not fit, or it is called under `jit`.
        Unsupported: a call is inside a `cond`, a `while_loop` or a `shard_map` of your own.

    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 256, 2, 16))
    >>> found = ma.audit(ma.attention, q, k, 100 * v, kernels=())
    >>> [str(each) for each in found.findings]
    []
    """
    return audited(trace(what, *inputs, **named), sample, kernels, grid, seconds)


def audited(
    program: Traced,
    sample: AuditSample,
    kernels: Sequence[str] | None = None,
    grid: Sequence[int] | None = None,
    seconds: float = 0.0,
    names: Sequence[str] = (),
) -> Audit:
    """Run a traced program and return its audit; `names` are those of its calls, if known."""
    kernels = () if kernels is None and not sample.outputs else kernels
    if finite(seconds, 0) is None:
        rule = "it must be a number of seconds, at least 0"
        raise InputError("seconds", brief(seconds), rule, "give 0.2, or 0 for no times")
    grid, calls = _checked_grid(grid), [place.call for place in program.places]
    grids = [_grid_of(call, grid) for call in calls]
    compared = dict(zip(calls, (candidates(call, kernels) for call in calls), strict=True))
    of_grid = dict(zip(calls, grids, strict=True))

    def measure(call: MarkedCall, operands: Any, every: Any) -> Any:
        found = measures_of(call, operands, every, sample, of_grid[call])
        return found | errors_of(call, operands, sample, compared[call])

    try:
        ran = list(_ran(program, measure, sample))
    except Exception as failed:  # any error of a compiler or a device
        if not any(compared.values()):
            raise
        row = KernelAudit("all calls", "all kernels", False, note=first_line(failed))
        return replace(audited(program, sample, (), grid, 0.0, names), kernels=(row,))
    layers: dict[str, LayerAudit] = {}
    shapes: dict[Any, tuple[MarkedCall, list[LayerAudit]]] = {}
    for i, at, place, values in ran:
        if all(values.pop("ran")):
            name = str(names[i] if names else place.call.name or f"call {i + 1}")
            layer = _layer(_own_name(name, at, layers), place.call, values, sample)
            layers[layer.name] = layer
            shapes.setdefault(place.call.plan.call, (place.call, []))[1].append(layer)
    rows = [_kernels(call, compared[call], of, seconds) for call, of in shapes.values()]
    windows = "; ".join(_windows(each) for each in dict.fromkeys(g for g in grids if g))
    found = tuple(layers.values())
    return Audit(calls[0].plan.target.device_kind, _in_words(sample, program), windows, found,
                 tuple(chain(*rows)), findings(found))  # fmt: skip


def _ran(program: Traced, measure: Any, sample: AuditSample) -> Iterator[Any]:
    """Run a program; yield each call's number, steps of scans, place and measures by name."""
    chosen = chosen_calls(program, sample)
    run = jax.jit(lambda *arrays: program.measured(measure, chosen)(*arrays)[1])
    every = jax.device_get(run(*program.inputs))
    for i, (place, found) in enumerate(zip(program.places, every, strict=True)):
        for at in np.ndindex(place.lengths):
            yield i, at, place, {name: x[at] for name, x in found.items()}


def cost_of(program: Traced, sample: AuditSample, budget: float = 2.0) -> tuple[float, float]:
    """Return the seconds of a program alone, and with the measures of a sample in it."""

    def measure(call: MarkedCall, operands: Any, every: Any) -> Any:
        return measures_of(call, operands, every, sample, _grid_of(call, None))

    beside = program.measured(measure, chosen_calls(program, sample))
    jobs = {"alone": jaxpr_as_fun(program.jaxpr), "audited": beside}
    works = [TimedFunction(f, lambda: [program.inputs], name=name) for name, f in jobs.items()]
    times = timed(works, budget)
    if failed := times[0].failed or times[1].failed:
        remedy = "run the model by itself, or audit a smaller input"
        raise InputError("cost", "not timed", f"the program did not run: {failed}", remedy)
    return times[0].seconds, times[1].seconds


def save_calls(path: str | Path, what: Callable[..., Any], *inputs: Any, **named: Any) -> None:
    """Run a model once, and write q, k and v of every attention call into a safetensors file.

    `maxattn audit --tensors FILE` reads the file. Masks and biases are not in it; examples
    that `vmap` maps are batch rows. The file is as large as q, k and v of all calls together.

    Args:
        path: the file.
        what, inputs, named: as for `audit`.
    """
    from safetensors.flax import save_file

    program, tensors = trace(what, *inputs, **named), dict[str, Any]()

    def measure(_: MarkedCall, operands: Any, every: Any) -> dict[str, Any]:
        return dict(zip("qkv", every, strict=True))

    for i, at, place, found in _ran(program, measure, EVERYTHING):
        own = _own_name(place.call.name or f"call {i + 1}", at, {x[:-2] for x in tensors})
        tensors |= {f"{own}.{n}": jnp.asarray(x) for n, x in found.items()}
    with replacing(Path(path)) as beside:
        save_file(tensors, beside)


# ---- the program ---------------------------------------------------------------------------------


def trace(what: Callable[..., Any], *inputs: Any, **named: Any) -> Traced:
    """Trace a module or function for an audit; the attention modules of a model get names.

    Arrays are inputs of the program. Rotary tables and masks with known numbers stay constants.
    """
    of, method = what, None
    if inspect.ismethod(what) and isinstance(what.__self__, nnx.Module):
        of, method = what.__self__, what.__func__
    parts = (inputs, named, nnx.state(of) if isinstance(of, nnx.Module) else ())
    if any(map(is_tracer, (jnp.zeros(()), *jax.tree.leaves(parts)))):  # jit traces zeros, too
        rule = "an audit runs a program, and this one is being traced"
        remedy = "call ma.audit outside of jit, scan, vmap and grad; it follows calls inside them"
        raise InputError("audit", "called in a function under trace", rule, remedy)
    name = str(getattr(what, "__name__", type(what).__name__))
    leaves, structure = jax.tree.flatten((inputs, named), is_leaf=_is_constant)
    is_array = [isinstance(x, jax.Array | np.ndarray) for x in leaves]
    arrays = [x for x, is_one in zip(leaves, is_array, strict=True) if is_one]

    def arguments(arrays: Sequence[Any]) -> Any:
        rest = iter(arrays)
        whole = [next(rest) if is_one else x for x, is_one in zip(leaves, is_array, strict=True)]
        return jax.tree.unflatten(structure, whole)

    graph, state = nnx.split(_with_names(of)) if isinstance(of, nnx.Module) else (None, None)

    def call(state: Any, *arrays: Any) -> Any:
        args, kwargs = arguments(arrays)
        f: Any = of if graph is None else nnx.merge(graph, cast(Any, state))
        return f(*args, **kwargs) if method is None else method(f, *args, **kwargs)

    return traced(call, [state, *arrays], name)


def _is_constant(x: Any) -> bool:
    kept = isinstance(x, Rotary | Mask)
    return kept and not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(x))


def _with_names(model: nnx.Module) -> nnx.Module:
    """Return a copy of a model, with the same arrays, whose modules name the calls inside them."""
    copy = nnx.merge(*nnx.split(model))
    for path, node in nnx.iter_graph(copy):
        if isinstance(node, nnx.Module):
            name = ".".join(map(str, path)) or type(node).__name__
            setattr(node, "audit_name", name)  # noqa: B010  (of any module)
            node.__class__ = _naming(type(node))
    return copy


@cache
def _naming(kind: type[nnx.Module]) -> type[nnx.Module]:
    """Return a subclass whose calls name what they call, as `ma.attention`, by its own path."""
    if not any("__call__" in vars(each) for each in kind.__mro__):
        return kind
    plain: Any = kind.__call__

    @wraps(plain)
    def call(self: Any, *args: Any, **named: Any) -> Any:
        with layer_named(self):
            return plain(self, *args, **named)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def chosen_calls(program: Traced, sample: AuditSample) -> list[np.ndarray]:
    """Choose the calls to measure: for each place, a bool for each step of the scans around it."""
    counts = [prod(place.lengths) for place in program.places]
    taken = np.zeros(sum(counts), bool)
    taken[sample.some(sum(counts), sample.calls, salt=3)] = True
    parts = np.split(taken, np.cumsum(counts)[:-1])
    return [x.reshape(p.lengths) for x, p in zip(parts, program.places, strict=True)]


# ---- grids ---------------------------------------------------------------------------------------


def _checked_grid(grid: Sequence[int] | None) -> tuple[int, ...] | None:
    if grid is None:
        return None
    sizes = tuple(grid)
    if len(sizes) not in (2, 3) or any(whole(n, 1) is None for n in sizes):
        rule = "it must be (frames, height, width) or (height, width), numbers of tokens"
        raise InputError("grid", brief(grid), rule, "give for example grid=(21, 30, 52)")
    return sizes


def _grid_of(call: MarkedCall, given: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return the grid of a call's last tokens; None if unknown, or if q and k differ in length."""
    tokens, keys = call.plan.call.q_len, call.plan.call.kv_len
    if given is None:
        found = None if call.rotary is None else grid_of_table(call.rotary)
        return found if found and tokens == keys else None
    if call.plan.call.role == "cross" or tokens != keys:
        return None
    if (size := int(np.prod(given))) > tokens:
        rule = f"it has {size} tokens, and the call has {tokens}"
        raise InputError("grid", given, rule, "give the grid of the tokens after patching")
    return given


def grid_of_table(rotary: Rotary) -> tuple[int, ...] | None:
    """Read the grid from a table of `rope_3d` or `rope_2d`; None if it is of another kind."""
    if is_tracer(rotary.cos) or rotary.cos.ndim != 2:
        return None
    table = np.asarray(rotary.cos) + 1j * np.asarray(rotary.sin)
    tokens, pairs = table.shape
    space = 2 * pairs // 6
    for parts in ((pairs - 2 * space, space, space), (pairs - pairs // 2, pairs // 2)):
        starts = np.cumsum((0, *parts))
        if min(parts) < 1:
            continue
        # An axis keeps its first angle while all axes inside it run through once.
        runs = [int(np.argmax(x != x[0])) or tokens for x in table.T[starts[:-2]]]
        sizes = *(a // b for a, b in zip([tokens, *runs], runs, strict=False)), runs[-1]
        each = [table[:, a:b] for a, b in pairwise(starts)]
        if prod(sizes) == tokens and all(_is_of_axis(x, i, sizes) for i, x in enumerate(each)):
            return sizes
    return None


def _is_of_axis(channels: np.ndarray, axis: int, sizes: tuple[int, ...]) -> bool:
    cells = channels.reshape(*sizes, -1)
    line = cells[tuple(slice(None) if i == axis else slice(1) for i in range(len(sizes)))]
    return np.array_equal(cells, np.broadcast_to(line, cells.shape))


def _windows(grid: tuple[int, ...]) -> str:
    reaches = (f"{n} ±{reach(size)}" for n, size in zip(AXES[3 - len(grid) :], grid, strict=True))
    return f"{' x '.join(map(str, grid))}, windows {', '.join(reaches)}"


# ---- the result ----------------------------------------------------------------------------------


def _layer(name: str, call: MarkedCall, values: Any, sample: AuditSample) -> LayerAudit:
    its, style = call.plan.call, "" if call.rotary is None else call.rotary.style
    facts = its.shape_text, its.role, call.plan.kernel.name, its.dtype, style
    heads = tuple(map(int, sample.heads_of(its.heads)))
    return LayerAudit(name, *facts, heads, {n: tuple(map(float, x)) for n, x in values.items()})


def _own_name(name: str, at: tuple[int, ...], taken: Collection[str]) -> str:
    """Add the steps of scans to a name, and a number if another call has the name already."""
    own = name + "".join(f"[{i}]" for i in at)
    count = sum(other == own or other.startswith(f"{own} (") for other in taken)
    return f"{own} ({count + 1})" if count else own


def _kernels(
    call: MarkedCall, kernels: Sequence[Candidate], layers: Sequence[LayerAudit], seconds: float
) -> Iterator[KernelAudit]:
    costs = costs_of(call, kernels, seconds) if seconds > 0 else {}
    for name, _, note in kernels:
        row = KernelAudit(call.plan.call.shape_text, name, name == call.plan.kernel.name, note=note)
        error, where = max(_errors(layers, f"error {name}"), default=(row.error, ""))
        cost = costs.get(name, Cost())
        ms = 1e3 * cost.seconds if cost.seconds else row.ms
        note = note or cost.failed
        yield replace(row, error=error, where=where, ms=ms, bytes=cost.bytes, note=note)


def _errors(layers: Sequence[LayerAudit], name: str) -> Iterator[tuple[float, str]]:
    for layer in layers:
        for head, error in zip(layer.heads, layer.measures.get(name, ()), strict=False):
            if error == error:
                yield error, f"{layer.name}, head {head}"


def _in_words(sample: AuditSample, program: Traced) -> str:
    calls = [place.call.plan.call for place in program.places]

    def part(wanted: int | None, most: int, what: str) -> str:
        return f"all {what}" if wanted is None or wanted >= most else f"{wanted} {what}"

    longest = max(call.q_len for call in calls)
    queries = part(len(sample.rows(longest)), longest, "queries")
    heads = part(sample.heads, max(call.heads for call in calls), "heads")
    every = part(sample.calls, sum(prod(place.lengths) for place in program.places), "calls")
    return f"{queries} of a batch row, {heads}, {every}, seed {sample.seed}"
