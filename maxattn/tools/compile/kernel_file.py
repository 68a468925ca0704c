"""A user's attention function, read from a file, to compile in place of maxattn's.

FUNCTION(q, k, v, config) takes arrays [B, T, N, H], [B, S, K, H] and [B, S, K, V] and the config of
the command, and returns [B, T, N, V]; with `--layout flat` [B, T, N*H], [B, S, K*H] and so on. It
runs on one device, and gets every key: a mask only counts the tiles that an estimate prices.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from maxattn.config.errors import plain
from maxattn.config.numbers import whole_in
from maxattn.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from maxattn.tools.compile.job import CompileJob

OPTION = "--kernel-file"


def read_kernel_file(text: str) -> str:
    """Check PATH:FUNCTION, and return it with the absolute path."""
    path, _, function = text.rpartition(":")
    if not path or not function.isidentifier():
        rule = "it must name a file and a function in it"
        raise InputError(OPTION, text, rule, f"write {OPTION} my_kernel.py:attention")
    if not Path(path).is_file():
        rule = f"there is no file {path}"
        raise InputError(OPTION, text, rule, "name a Python file that exists")
    return f"{Path(path).resolve()}:{function}"


def read_visited(text: str) -> tuple[int, ...]:
    """Read FULL,MASKED: the tiles of one head without and with a test of the mask."""
    found = [number for word in text.split(",") if (number := whole_in(word, 0)) is not None]
    if len(found) != 2 or text.count(",") != 1 or not sum(found):
        rule = "it must be FULL,MASKED: the tiles of one head without and with a test of the mask"
        raise InputError("--visited", plain(text), rule, "write for example --visited 28,8")
    return tuple(found)


def check_kernel_job(job: CompileJob, devices: int) -> None:
    """Refuse a job that a user's function cannot run: modules, masks, several devices."""
    if job.module or job.block:
        _refuse(job, "the function is compiled alone", "leave --module and --block out")
    counts = bool(job.visited) or not job.shape.mask.is_full
    if counts and (job.training or not job.estimate):
        rule = "the function gets no mask: --mask and --visited count the tiles of its forward"
        _refuse(job, rule, "add --estimate without --train, or leave --mask and --visited out")
    if devices != 1:
        rule = f"the function runs on one device, and {job.topology} has {devices}"
        _refuse(job, rule, "add --devices 1, and give the shape that one device computes")


def traced_file(job: CompileJob, mesh: Mesh) -> Any:
    """Trace the function that a job names on abstract q, k and v."""
    import jax
    from jax.sharding import PartitionSpec

    from maxattn.measuring.passes import with_gradient
    from maxattn.tools.compile.programs import operand

    call, own = job.shape.call(), _loaded(job)
    # Kernel libraries look up the TPU in the mesh of a shard_map.
    specs: dict[str, Any] = {"in_specs": PartitionSpec(), "out_specs": PartitionSpec()}
    function = jax.shard_map(own, mesh=mesh, **specs, check_vma=False)
    letters, values = "BT." if job.flat else "BTNH", job.shape.value_dim or call.head_dim
    q, k, v, dout = (
        operand((call.batch, length, *dims), letters, call.dtype, mesh)
        for length, heads, dim in (
            (call.q_len, call.heads, call.head_dim),
            (call.kv_len, call.kv_heads, call.head_dim),
            (call.kv_len, call.kv_heads, values),
            (call.q_len, call.heads, values),
        )
        for dims in [(heads * dim,) if job.flat else (heads, dim)]
    )

    def run(*operands: Any) -> Any:
        out = function(*operands)
        if out.shape != dout.shape:
            rule = f"it must return the shape {list(dout.shape)}, and returns {list(out.shape)}"
            _refuse(job, rule, f"return [B, T, {'N*V' if job.flat else 'N, V'}]")
        return out

    try:
        if job.training:
            return jax.jit(with_gradient(run)).trace(q, k, v, dout)
        return jax.jit(run).trace(q, k, v)
    except InputError:
        raise
    except Exception as error:  # whatever the user's own code raises
        return _refuse(job, f"it cannot be traced: {_first_line(error)}", "mend the function")


def name_of(job: CompileJob) -> str:
    """Return FILE:FUNCTION without the file's folder."""
    path, _, name = job.kernel_file.rpartition(":")
    return f"{Path(path).name}:{name}"


def _loaded(job: CompileJob) -> Callable[..., Any]:
    path, _, name = job.kernel_file.rpartition(":")
    module = _module(job, Path(path))
    function = getattr(module, name, None)
    if not callable(function):
        rule = f"{Path(path).name} has no function {name}"
        known = [each for each, value in vars(module).items() if callable(value)]
        _refuse(job, rule, did_you_mean(name, known) or "name a function of the file")
    return lambda q, k, v: function(q, k, v, job.config)


def _module(job: CompileJob, path: Path) -> ModuleType:
    """Run a file as a module, which may import other files of its folder."""
    name = f"kernel_file_{path.stem}"  # a file may have the name of a library
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        _refuse(job, f"{path.name} is no Python file", "name a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's own code raises
        _refuse(job, f"{path.name} cannot be loaded: {_first_line(error)}", "mend the file")
    return module


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _refuse(job: CompileJob, rule: str, remedy: str) -> NoReturn:
    raise InputError(OPTION, name_of(job), rule, remedy) from None
