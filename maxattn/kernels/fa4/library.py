"""The names, operands, layouts and alignments that maxattn uses from inside fa4-jax 0.1.

`mismatch` compares the table below with the source of the installed package, without importing the
package. `Fa4.supports` calls `mismatch`, so that nothing is checked when a kernel is compiled.
Only the version of cutlass-dsl is checked, not what its classes have.

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
from maxattn.kernels.fa4.work import Cut

HOPPER = 90  # the architecture of the two kernels that hopper.py extends

# By file: "Class.method" -> operands of the method that hopper.py or scheduler.py read or replace;
# "Class" -> methods and attributes of the class that they read; "" -> names at the top of the file
# that maxattn uses. tests/kernels/fa4/test_library.py finds what is missing here.
USED: Final[dict[str, dict[str, str]]] = {
    "cute/flash_fwd_sm90.py": {
        "FlashAttentionForwardSm90": (
            "_get_shared_storage_cls num_mma_threads num_epilogue_threads sO_layout use_tma_Q "
            "use_tma_KV"
        ),
        "FlashAttentionForwardSm90.kernel": "TileScheduler tile_sched_params",
        "FlashAttentionForwardSm90.load": "sQ TileSchedulerCls block_info blocksparse_tensors",
        "FlashAttentionForwardSm90.mma": (
            "sQ sO TileSchedulerCls AttentionMaskCls block_info blocksparse_tensors aux_data"
        ),
    },
    "cute/flash_fwd.py": {
        "FlashAttentionForwardBase": "dtype tile_m tile_hdimv",
        "FlashAttentionForwardBase.epilogue": "acc_O lse tiled_mma tidx m_block head_idx batch_idx",
    },
    "cute/flash_bwd_sm90.py": {
        "FlashAttentionBackwardSm90": (
            "tile_m tile_hdim num_wg_dQ num_threads_per_warp_group tma_copy_bytes "
            "qhead_per_kvhead is_varlen_q"
        ),
        "FlashAttentionBackwardSm90.__call__": "mdQ_semaphore",
        "FlashAttentionBackwardSm90.dQaccum_store": (
            "mdQaccum sdQaccum block_info TileSchedulerCls SeqlenInfoCls blocksparse_tensors "
            "mdQ_semaphore"
        ),
        "FlashAttentionBackwardSm90.epilogue_dKV": "batch_idx",
        "FlashAttentionBackwardSm90.kernel": "TileScheduler tile_sched_params",
        "FlashAttentionBackwardSm90.load": "SeqlenInfoCls block_info blocksparse_tensors",
        "FlashAttentionBackwardSm90.mma": (
            "AttentionMaskCls SeqlenInfoCls block_info blocksparse_tensors"
        ),
        "FlashAttentionBackwardSm90.mma_one_m_block": "mask_fn",
    },
    "cute/block_info.py": {
        "BlockInfo": "tile_n",
        "BlockInfo.get_m_block_min_max": "seqlen_info n_block",
        "BlockInfo.get_n_block_min_max": "seqlen_info m_block",
    },
    "cute/seqlen_info.py": {"SeqlenInfoQK": "seqlen_k"},
    "cute/mask.py": {
        "": (
            "mask_r2p_lambda r2p_bitmask_above r2p_bitmask_below sm90_col_to_r2p_idx "
            "_cols_match_r2p"
        ),
        "AttentionMask": "apply_mask_mod_sm80 tile_m tile_n seqlen_k",
    },
    "cute/tile_scheduler.py": {
        "": "SingleTileScheduler WorkTileInfo ParamsBase",
        "SingleTileScheduler": (
            "params _blk_coord _is_first_block initial_work_tile_info get_current_work "
            "advance_to_next_work"
        ),
    },
    "cute/block_sparsity.py": {"": "BlockSparseTensors"},
    "cute/barrier.py": {"": "wait_eq arrive_inc"},
    "cute/quack/copy_utils.py": {"": "cpasync_bulk_s2g cpasync_reduce_bulk_add_f32"},
    "cute/quack/layout_utils.py": {"": "reshape_acc_to_mn"},
    "masks.py": {"": "MaskMod static"},
    "cute/named_barrier.py": {"NamedBarrierBwd": "dQFullWG0 dQEmptyWG0"},
    "cute/utils.py": {
        "": "AuxData scalar_to_ssa ssa_to_scalar atomic_add_i32",
        "AuxData": "tensors",
    },
    "kernels.py": {
        "": (
            "_QKV_SPEC _F32_SPEC _LSE_SPEC _DTYPES _fwd_cfg_sm90 _bwd_cfg_sm90 _sm90_bwd_kwargs "
            "_BwdPlan _get_bwd_pre _get_bwd_post _bwd_post_params"
        ),
        "_BwdCfgSm90": "tile_m tile_n",
        "_FwdCfgSm90": "intra_wg_overlap mma_pv_is_rs",
    },
    "attention.py": {"": "AttnConfig fa4_fwd_p fa4_vjp_p"},
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
    for file, places in USED.items():
        path = root / file
        if not path.is_file():
            return f"it has no {file}"
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for where, names in places.items():
            found = _names_in(tree, where)
            if found is None:
                return f"{file} has no {where}"
            if lacking := [name for name in names.split() if name not in found]:
                return f"{where or file} has no {', '.join(lacking)}"
    return None


def _names_in(tree: ast.Module, where: str) -> set[str] | None:
    """Return the names that a file, a class, or a method's operands have; None if it is missing."""
    if not where:
        return {name for node in tree.body for name in _defined(node)}
    name, _, method = where.partition(".")
    classes = (x for x in tree.body if isinstance(x, ast.ClassDef) and x.name == name)
    if (found := next(classes, None)) is None or not method:
        return None if found is None else {x for node in ast.walk(found) for x in _defined(node)}
    methods = (x for x in found.body if isinstance(x, ast.FunctionDef) and x.name == method)
    operands = next((x.args for x in methods), None)
    return operands and {a.arg for a in (*operands.args, *operands.kwonlyargs)}


def _defined(node: ast.AST) -> Iterable[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    if isinstance(node, ast.ImportFrom | ast.Import):
        return [alias.asname or alias.name for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
    found = (x for target in targets for x in ast.walk(target))
    return [getattr(x, "id", "") or getattr(x, "attr", "") for x in found]


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
class Spec:
    """What a kernel is compiled for, beside which arrays it has (`KernelArrays`); hashable.

    Args:
        dtype, head_dim, group: dtype and H of q, k and v; query heads per KV head.
        scale: multiplies the scores.
        tile: numbers of queries and keys in a tile.
        cut: which tile rows are cut into splits; without lists, also the formula of the items.
        queue: number of persistent thread blocks; 0 if each item has its own thread block.
        test: the test of pairs in mixed tiles; None without lists.
        bias: (whether each batch row, whether each head has its own bias); None without a bias.
    """

    dtype: str
    head_dim: int
    group: int
    scale: float
    tile: tuple[int, int]
    cut: Cut = Cut()  # noqa: RUF009
    queue: int = 0
    test: PairTest | None = None
    bias: tuple[bool, bool] | None = None


class KernelArrays(NamedTuple):
    """The operands or the results of a kernel; an array that it does not have is None.

    Args:
        block, grads: K and V, and dK and dV, of a ring's block.
        slots, slot_lse: float32 outputs and the LSE of splits.
        lse2, delta: statistics of each query and head for a backward; the LSE is in base 2.
        lists, items, lengths: the tiles, the work items and the numbers of real keys.
        count: the number of items that were taken from the queue.
        dq, dk, dv: gradients, or float32 sums.
        flags: whether the first key tile has stored the dQ of each query tile.
        last_dk, last_dv: the gradients of keys that are split, if other keys are not.
        sums, grad: float32 sums, and the gradient that they become.
        arrays: the arrays of the test of pairs, or the bias.
    """

    q: Any = None
    k: Any = None
    v: Any = None
    block: Any = None
    out: Any = None
    dout: Any = None
    lse: Any = None
    slots: Any = None
    slot_lse: Any = None
    lse2: Any = None
    delta: Any = None
    lists: Any = None
    items: Any = None
    lengths: Any = None
    count: Any = None
    dq: Any = None
    flags: Any = None
    dk: Any = None
    dv: Any = None
    last_dk: Any = None
    last_dv: Any = None
    grads: Any = None
    sums: Any = None
    grad: Any = None
    arrays: tuple[Any, ...] = ()
