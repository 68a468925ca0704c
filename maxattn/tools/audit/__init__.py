"""`audit`: what a model's own activations do to attention, by layer and head.

measures.py has what is measured of a call, trace.py finds the calls of a program, kernels.py
compares kernels, unsafe.py has the rules, and report.py the result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.extend.core import jaxpr_as_fun

from maxattn.config.numbers import whole
from maxattn.errors import InputError, brief
from maxattn.jax_private.mesh import is_tracer
from maxattn.jax_private.observed import MarkedCall
from maxattn.masks import Mask
from maxattn.modules.base import AttentionBase
from maxattn.rope import Rotary
from maxattn.tools.audit.kernels import Candidate, Cost, candidates, costs_of, errors_of
from maxattn.tools.audit.measures import AXES, AuditSample, measures, reach
from maxattn.tools.audit.report import Audit, Finding, KernelAudit, LayerAudit
from maxattn.tools.audit.trace import CallPlace, Traced, traced
from maxattn.tools.audit.unsafe import findings
from maxattn.tools.bench.timing import TimedFunction
from maxattn.tools.bench.timing import measure as timed
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

    Calls are found wherever they are: in modules, under `jit`, `nnx.scan`, `lax.scan`
    and remat, and on a mesh. The measures are computed in the traced program. The model, its traces
    and its results stay as they are.

    Args:
        what: a module, or a function of arrays that calls attention: `ma.attention` itself too.
        inputs, named: its arguments.
        sample: the queries, heads and calls that are measured; default 64 queries of each call.
        kernels: kernels to compare; default all that can run the calls on this machine; () for
            none.
        grid: (frames, height, width) or (height, width) of the last tokens; default read from the
            rotary tables of `rope_3d` and `rope_2d`, if a module of maxattn gets one.
        seconds: about how long each kernel is timed; 0 for no times.

    Returns:
        an `Audit`, which prints as a table.

    Raises:
        InputError: no attention is called, or the grid does not fit.
        Unsupported: a call is inside a `cond`, a `while_loop` or a `shard_map` of your own.

    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 256, 2, 16))
    >>> found = ma.audit(ma.attention, q, k, 100 * v, kernels=())
    >>> [str(each) for each in found.findings]
    []
    """
    program = trace(what, *inputs, **named)
    return audited(program, sample, kernels, grid, seconds)


def audited(
    program: Traced,
    sample: AuditSample,
    kernels: Sequence[str] | None = None,
    grid: Sequence[int] | None = None,
    seconds: float = 0.0,
    names: Sequence[str] = (),
) -> Audit:
    """Run a traced program and return its audit; `names` are those of its calls, if known."""
    if kernels is None and not sample.outputs:
        kernels = ()
    grids = [_grid_of(place.call, _checked_grid(grid)) for place in program.places]
    compared = [candidates(place.call, kernels) for place in program.places]
    calls = [place.call for place in program.places]
    of_call = dict(zip(calls, zip(grids, compared, strict=True), strict=True))

    def measure(call: MarkedCall, operands: Any) -> Any:
        own_grid, own_kernels = of_call[call]
        found = measures(call, operands, sample, own_grid)
        return found | errors_of(call, operands, sample, own_kernels)

    chosen = chosen_calls(program, sample)
    run = jax.jit(lambda *arrays: program.measured(measure, chosen)(*arrays)[1])
    found = jax.device_get(run(*program.inputs))
    layers: list[LayerAudit] = []
    by_call: dict[Any, Any] = {}
    for i, (place, its, own) in enumerate(zip(program.places, found, compared, strict=True)):
        name = names[i] if names else place.call.name or f"call {i + 1}"
        new = _layers(place, name, its, sample, {layer.name for layer in layers})
        layers += new
        by_call.setdefault(place.call.plan.call, (place.call, own, []))[2].extend(new)
    rows = [row for call, own, of in by_call.values() for row in _kernels(call, own, of, seconds)]
    windows = "; ".join(_windows(each) for each in dict.fromkeys(g for g in grids if g))
    device = program.places[0].call.plan.target.device_kind
    found = tuple(layers), tuple(rows), findings(layers)
    return Audit(device, _in_words(sample), windows, *found)


def cost_of(program: Traced, sample: AuditSample, budget: float = 2.0) -> tuple[float, float]:
    """Return the seconds of a program alone, and with the measures of a sample in it."""
    chosen = chosen_calls(program, sample)

    def measure(call: MarkedCall, operands: Any) -> Any:
        return measures(call, operands, sample, _grid_of(call, None))

    jobs = {"alone": jaxpr_as_fun(program.jaxpr), "audited": program.measured(measure, chosen)}
    works = [TimedFunction(f, lambda: [program.inputs], name=name) for name, f in jobs.items()]
    alone, beside = timed(works, budget)
    if failed := alone.failed or beside.failed:
        remedy = "run the model by itself, or audit a smaller input"
        raise InputError("cost", "not timed", f"the program did not run: {failed}", remedy)
    return alone.seconds, beside.seconds


def save_calls(path: str | Path, what: Callable[..., Any], *inputs: Any, **named: Any) -> None:
    """Run a model once, and write q, k and v of every attention call into a safetensors file.

    `maxattn audit --tensors FILE` reads the file. Masks and biases are not in it. The file is as
    large as q, k and v of all calls together.

    Args:
        path: the file.
        what, inputs, named: as for `audit`.
    """
    from safetensors.flax import save_file

    program = trace(what, *inputs, **named)
    chosen = chosen_calls(program, AuditSample())
    run = jax.jit(lambda *x: program.measured(lambda _, operands: operands[:3], chosen)(*x)[1])
    tensors: dict[str, Any] = {}
    for i, (place, found) in enumerate(zip(program.places, run(*program.inputs), strict=True)):
        for at in np.ndindex(place.lengths):
            own = _own_name(place.call.name or f"call {i + 1}", at, {x[:-2] for x in tensors})
            tensors |= {f"{own}.{n}": x[at] for n, x in zip("qkv", found, strict=True)}
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
    name = str(getattr(what, "__name__", type(what).__name__))
    leaves, structure = jax.tree.flatten((inputs, named), is_leaf=_is_constant)
    is_array = [isinstance(x, jax.Array | np.ndarray) for x in leaves]
    arrays = [x for x, is_one in zip(leaves, is_array, strict=True) if is_one]

    def arguments(arrays: Sequence[Any]) -> Any:
        rest = iter(arrays)
        whole = [next(rest) if is_one else x for x, is_one in zip(leaves, is_array, strict=True)]
        return jax.tree.unflatten(structure, whole)

    if not isinstance(of, nnx.Module):

        def call(*arrays: Any) -> Any:
            args, kwargs = arguments(arrays)
            return of(*args, **kwargs)

        return traced(call, arrays, name)
    graph, state = nnx.split(_with_names(of))

    def call_module(state: Any, *arrays: Any) -> Any:
        args, kwargs = arguments(arrays)
        module = nnx.merge(graph, state)
        return module(*args, **kwargs) if method is None else method(module, *args, **kwargs)

    return traced(call_module, [state, *arrays], name)


def _is_constant(x: Any) -> bool:
    kept = isinstance(x, Rotary | Mask)
    return kept and not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(x))


def _with_names(model: nnx.Module) -> nnx.Module:
    """Return a copy of a model, with the same arrays, whose attention modules know their paths."""
    copy = nnx.merge(*nnx.split(model))
    for path, node in nnx.iter_graph(copy):
        if isinstance(node, AttentionBase):
            node.audit_name = ".".join(map(str, path)) or type(node).__name__
    return copy


def chosen_calls(program: Traced, sample: AuditSample) -> list[np.ndarray]:
    """Choose the calls to measure: for each place, a bool for each step of the scans around it."""
    counts = [place.count for place in program.places]
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
    for parts in ((pairs - 2 * space, space, space), (pairs // 2, pairs - pairs // 2)):
        starts = np.cumsum((0, *parts))[:-1]
        if min(parts) < 1:
            continue
        # An axis keeps its first angle while all axes inside it run through once.
        firsts = [table[:, start] for start in starts[:-1]]
        inner = [int(np.argmax(x != x[0])) or tokens for x in firsts]
        sizes = [*(a // b for a, b in zip([tokens, *inner[:-1]], inner, strict=True)), inner[-1]]
        if int(np.prod(sizes)) == tokens and _runs_over(table, starts, parts, sizes):
            return tuple(sizes)
    return None


def _runs_over(table: np.ndarray, starts: Any, parts: Any, sizes: list[int]) -> bool:
    """Tell whether the channels of each axis depend on that axis alone, and change along it."""
    cells = table.reshape(*sizes, -1)
    for axis, (start, width) in enumerate(zip(starts, parts, strict=True)):
        own = cells[..., start : start + width]
        others = tuple(i for i in range(len(sizes)) if i != axis)
        line = own[tuple(slice(None) if i == axis else slice(1) for i in range(len(sizes)))]
        if not np.array_equal(own, np.broadcast_to(line, own.shape)) or not others:
            return False
    return True


def _windows(grid: tuple[int, ...]) -> str:
    reaches = (f"{n} ±{reach(size)}" for n, size in zip(AXES[3 - len(grid) :], grid, strict=True))
    return f"{' x '.join(map(str, grid))}, windows {', '.join(reaches)}"


# ---- the result ----------------------------------------------------------------------------------


def _layers(
    place: CallPlace,
    name: str,
    found: Mapping[str, np.ndarray],
    sample: AuditSample,
    taken: set[str],
) -> list[LayerAudit]:
    call, plan = place.call.plan.call, place.call.plan
    style = "" if place.call.rotary is None else place.call.rotary.style
    facts = call.shape_text, call.role, plan.kernel.name, call.dtype, style
    heads = tuple(int(h) for h in sample.heads_of(call.heads))
    made: list[LayerAudit] = []
    for at in np.ndindex(place.lengths):
        values = {key: tuple(map(float, x[at])) for key, x in found.items()}
        if all(values.pop("ran")):  # else it is not chosen, or another branch of a cond ran
            made.append(LayerAudit(_own_name(name, at, taken), *facts, heads, values))
    return made


def _own_name(name: str, at: tuple[int, ...], taken: set[str]) -> str:
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


def _in_words(sample: AuditSample) -> str:
    queries = "all queries" if sample.queries is None else f"{sample.queries} queries"
    heads = "all heads" if sample.heads is None else f"{sample.heads} heads"
    calls = "all calls" if sample.calls is None else f"{sample.calls} calls"
    return f"{queries} of a batch row, {heads}, {calls}, seed {sample.seed}"
