"""FlashAttention-4's Hopper kernels over block-sparse lists that are cut into splits.

A thread block goes through one split of a list. A backward writes dK and dV to a batch row of its
own, or adds them to those of all splits; a forward writes its result in float32, and its
log-sum-exp, to arrays beside the output.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from maxattn.kernels.fa4.split_keys_kernel import AUX, EPILOGUE, write_split
from maxattn.kernels.fa4.split_queries_kernel import backward_in_splits, on_split_grid


@cache
def split_lists_backward(backward: Any, batch: int, splits: int, own_rows: bool) -> Any:
    """Make a backward over block-sparse lists, which has lists for each split of the queries.

    Those stand before the batch rows. Where query heads share keys, all splits add to the same dK
    and dV.

    Args:
        backward: a class whose rows start in the library's order.
        batch, splits: how many there are.
        own_rows: whether batch rows have lists of their own; else all share those of a split.
    """
    return backward_in_splits(backward, (batch, splits), _of_split(batch, own_rows))


@cache
def split_lists_forward(forward: Any, batch: int, splits: int, own_rows: bool) -> Any:
    """Make a forward over the same, with lists for each split of the keys.

    The results of splits are its first two auxiliary arrays: [splits,B,rows,N,H] and
    [splits,B,N,rows]. Arguments as for the backward.
    """
    arch, of_split = import_module("cutlass.cute").arch, _of_split(batch, own_rows)
    aux = import_module("fa4_jax.cute.utils").AuxData

    class SplitForward(on_split_grid(forward, batch, splits)):
        results: Any = None

        def load(self, *operands: Any) -> None:
            super().load(*map(of_split, operands))

        def mma(self, *operands: Any) -> None:
            self.results, tested = operands[AUX].tensors[:2], operands[AUX].tensors[2:]
            operands = (*operands[:AUX], aux(tensors=tuple(tested) or None), *operands[AUX + 1 :])
            super().mma(*map(of_split, operands))
            self.results = None  # of one compilation alone

        def epilogue(self, *operands: Any) -> None:
            of = {name: operands[n] for name, n in EPILOGUE.items()}
            write_split(self, of, arch.block_idx()[2] // batch, of["m_block"])

    return SplitForward


def _of_split(batch: int, own_rows: bool) -> Callable[[Any], Any]:
    """Make what hands a thread block the lists of its split, among operands of a method."""
    cute = import_module("cutlass.cute")
    lists = import_module("fa4_jax.cute.block_sparsity").BlockSparseTensors

    def moved(x: Any) -> Any:
        if x is None:
            return None
        split = cute.arch.block_idx()[2] // batch
        first = split * batch if own_rows else split
        x = cute.domain_offset((first, *(0 for _ in x.shape[1:])), x)
        if own_rows:
            return x
        layout = cute.make_layout(x.shape, stride=(0, *x.stride[1:]))  # all batch rows share them
        return cute.make_tensor(x.iterator, layout)

    return lambda x: lists(*(moved(array) for array in x)) if isinstance(x, lists) else x
