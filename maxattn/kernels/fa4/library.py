"""The names, operands, layouts and alignments that maxattn uses from inside fa4-jax 0.1.

`mismatch` compares the table below with the source of the installed package, without importing the
package. `Fa4.supports` calls `mismatch`, so that nothing is checked when a kernel is compiled.
Only the version of cutlass-dsl is checked.

To move to another fa4-jax, change `TESTED` in jax_private/versions.py, run `mismatch`, mend what it
reports in hopper.py, scheduler.py, mask_test.py, run.py and elsewhere.py, then run
`make test-fa4-compile` and, on a GPU, `make test-gpu`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any, Final, NamedTuple

from maxattn.jax_private.cute import import_cute
from maxattn.kernels.fa4.mask_test import PairTest
from maxattn.kernels.fa4.work import Uniform

HOPPER = 90  # the architecture of the two kernels that hopper.py extends

# (file, method) -> the operands of the method that hopper.py or scheduler.py reads or replaces;
# (file, "") -> the names at the top of the file that maxattn uses.
USED: Final[dict[tuple[str, str], tuple[str, ...]]] = {
    ("cute/flash_fwd_sm90.py", "FlashAttentionForwardSm90.kernel"): (
        *("TileScheduler", "tile_sched_params"),
    ),
    ("cute/flash_fwd_sm90.py", "FlashAttentionForwardSm90.load"): (
        *("sQ", "TileSchedulerCls", "block_info", "blocksparse_tensors"),
    ),
    ("cute/flash_fwd_sm90.py", "FlashAttentionForwardSm90.mma"): (
        *("sQ", "sO", "TileSchedulerCls", "AttentionMaskCls", "block_info", "blocksparse_tensors"),
        "aux_data",
    ),
    ("cute/flash_fwd.py", "FlashAttentionForwardBase.epilogue"): (
        *("acc_O", "lse", "tiled_mma", "tidx", "m_block", "head_idx", "batch_idx"),
    ),
    ("cute/flash_bwd_sm90.py", "FlashAttentionBackwardSm90.__call__"): ("mdQ_semaphore",),
    ("cute/flash_bwd_sm90.py", "FlashAttentionBackwardSm90.kernel"): (
        *("TileScheduler", "tile_sched_params"),
    ),
    ("cute/flash_bwd_sm90.py", "FlashAttentionBackwardSm90.load"): (
        *("SeqlenInfoCls", "block_info", "blocksparse_tensors"),
    ),
    ("cute/flash_bwd_sm90.py", "FlashAttentionBackwardSm90.mma"): (
        *("AttentionMaskCls", "SeqlenInfoCls", "block_info", "blocksparse_tensors"),
    ),
    ("cute/flash_bwd_sm90.py", "FlashAttentionBackwardSm90.mma_one_m_block"): ("mask_fn",),
    ("cute/flash_bwd_sm90.py", "FlashAttentionBackwardSm90.epilogue_dKV"): ("batch_idx",),
    ("cute/flash_bwd_sm90.py", "FlashAttentionBackwardSm90.dQaccum_store"): (
        *("mdQaccum", "sdQaccum", "block_info", "TileSchedulerCls", "SeqlenInfoCls"),
        *("blocksparse_tensors", "mdQ_semaphore"),
    ),
    ("cute/block_info.py", "BlockInfo.get_n_block_min_max"): ("seqlen_info", "m_block"),
    ("cute/block_info.py", "BlockInfo.get_m_block_min_max"): ("seqlen_info", "n_block"),
    ("cute/mask.py", "AttentionMask.apply_mask_mod_sm80"): (),
    ("cute/mask.py", ""): (
        *("mask_r2p_lambda", "r2p_bitmask_above", "r2p_bitmask_below", "sm90_col_to_r2p_idx"),
        "_cols_match_r2p",
    ),
    ("cute/tile_scheduler.py", ""): ("SingleTileScheduler", "WorkTileInfo", "ParamsBase"),
    ("cute/block_sparsity.py", ""): ("BlockSparseTensors",),
    ("cute/barrier.py", ""): ("wait_eq", "arrive_inc"),
    ("cute/quack/copy_utils.py", ""): ("cpasync_bulk_s2g", "cpasync_reduce_bulk_add_f32"),
    ("cute/quack/layout_utils.py", ""): ("reshape_acc_to_mn",),
    ("masks.py", ""): ("MaskMod", "static"),
    ("cute/named_barrier.py", ""): ("NamedBarrierBwd",),
    ("cute/utils.py", ""): ("AuxData", "scalar_to_ssa", "ssa_to_scalar", "atomic_add_i32"),
    ("kernels.py", ""): (
        *("_QKV_SPEC", "_F32_SPEC", "_LSE_SPEC", "_DTYPES", "_fwd_cfg_sm90", "_bwd_cfg_sm90"),
        *("_sm90_bwd_kwargs", "_BwdPlan", "_get_bwd_pre", "_get_bwd_post", "_bwd_post_params"),
    ),
    ("attention.py", ""): ("AttnConfig", "fa4_fwd_p", "fa4_vjp_p"),
}

# fa4-jax promises its compiler addresses at multiples of 256 bytes, and its calls refuse other
# addresses. But XLA passes a slice of a larger array without a copy, at a multiple of a token's
# bytes. The kernels need multiples of 16 bytes, for their widest loads and for bulk copies.
ALIGNED: Final = {"_QKV_SPEC": 16, "_QKV3_SPEC": 16, "_F32_SPEC": 16, "_LSE_SPEC": 4}


@cache
def mismatch() -> str | None:
    """Return what the installed fa4-jax lacks of `USED`; None if it fits or is not installed."""
    spec = find_spec("fa4_jax")
    roots = () if spec is None else spec.submodule_search_locations or ()
    return next((found for root in roots if (found := mismatch_in(Path(root)))), None)


def mismatch_in(root: Path) -> str | None:
    """Return what the sources of fa4-jax in a folder lack of `USED`, or None."""
    trees: dict[str, ast.Module] = {}
    for (file, where), names in USED.items():
        path = root / file
        if not path.is_file():
            return f"it has no {file}"
        if file not in trees:
            trees[file] = ast.parse(path.read_text(encoding="utf-8"))
        found = _names_in(trees[file], where)
        if found is None:
            return f"{file} has no {where}"
        if lacking := [name for name in names if name not in found]:
            return f"{where or file} has no {', '.join(lacking)}"
    return None


def _names_in(tree: ast.Module, where: str) -> set[str] | None:
    """Return the operands of `Class.method`, or for "" a file's top-level names; or None."""
    if not where:
        return {name for node in tree.body for name in _defined(node)}
    class_name, method = where.split(".")
    bodies = (n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == class_name)
    methods = (n for body in bodies for n in body if isinstance(n, ast.FunctionDef))
    found = next((n.args for n in methods if n.name == method), None)
    return None if found is None else {a.arg for a in (*found.args, *found.kwonlyargs)}


def _defined(node: ast.stmt) -> Iterable[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    if isinstance(node, ast.ImportFrom | ast.Import):
        return [alias.asname or alias.name for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [x.id for x in targets if isinstance(x, ast.Name)]


@cache
def kernels() -> Any:
    """Return fa4_jax.kernels, after its array specs got the alignments of `ALIGNED`."""
    import_cute()
    found = import_module("fa4_jax.kernels")
    for name, size in ALIGNED.items():
        setattr(found, name, replace(getattr(found, name), assumed_align=size))
    return found


def attention() -> Any:
    """Return fa4_jax.attention, whose primitives run on GPUs other than Hopper."""
    kernels()
    return import_module("fa4_jax.attention")


class NamedOperands(dict[str, Any]):
    """The operands of a method of the library by parameter name, in the method's order."""

    def __init__(self, method: Any, operands: tuple[Any, ...]) -> None:
        names = [name for name in signature(method).parameters if name != "self"]
        super().__init__(zip(names, operands, strict=False))


# ---- what a kernel is compiled for, and the arrays that it reads ---------------------------------


@dataclass(frozen=True)
class KernelKind:
    """maxattn's options for which a kernel is compiled, beside the library's settings.

    Args:
        cut: which tile rows are cut into splits.
        uniform: whether a formula gives the items; else an array lists them.
        queue: number of persistent thread blocks; 0 if each item has its own thread block.
        lists: the form of the lists, "ranges" or "explicit" (lists.py); "" without lists.
        own_rows: whether each batch row has its own lists.
        lengths: whether each batch row has its own number of real keys.
        writes_first: whether the first key tile stores dQ, to which the others add.
    """

    cut: Uniform
    uniform: bool = True
    queue: int = 0
    lists: str = ""
    own_rows: bool = False
    lengths: bool = False
    writes_first: bool = False


@dataclass(frozen=True)
class Spec:
    """Everything that a kernel is compiled for, as a hashable key of the compiler's cache.

    Args:
        dtype, head_dim, group: dtype and H of q, k and v; query heads per KV head.
        scale: multiplies the scores.
        tile: numbers of queries and keys in a tile.
        kind: maxattn's other options.
        test: the test of pairs in mixed tiles; None without lists.
        bias: (whether each batch row, whether each head has its own bias); None without a bias.
    """

    dtype: str
    head_dim: int
    group: int
    scale: float
    tile: tuple[int, int]
    kind: KernelKind
    test: PairTest | None = None
    bias: tuple[bool, bool] | None = None


class ForwardOperands(NamedTuple):
    """The arrays that a forward reads; an array that it does not need is None."""

    q: Any
    k: Any
    v: Any
    lists: Any = None
    items: Any = None
    lengths: Any = None
    zero: Any = None  # 0, in the memory in which the kernel counts taken items
    arrays: tuple[Any, ...] = ()  # the arrays of the test of pairs, or the bias


class BackwardOperands(NamedTuple):
    """The arrays that a backward reads; an array that it does not need is None.

    Args:
        lse, delta: statistics of each query and head; the LSE is in base 2.
        sums: zeros, which the kernel replaces by results in place: dQ or the flags, and dK and dV
            if query heads share keys.
    """

    q: Any
    k: Any
    v: Any
    dout: Any
    lse: Any
    delta: Any
    lists: Any = None
    items: Any = None
    lengths: Any = None
    sums: tuple[Any, ...] = ()
    arrays: tuple[Any, ...] = ()
