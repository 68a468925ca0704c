"""How persistent thread blocks take the next row as soon as they are free.

Rows of a causal mask or of segments are uneven, and those that ids leave are known on the device
alone; those where segments meet take several times as long as others: dealt out beforehand, a row
to each thread block in turn, they would keep some SMs (streaming multiprocessors) busy long after
the rest. So all thread blocks count up one number in memory. The warp that loads fetches it while
the last row is multiplied, and hands it to the warps that multiply through shared memory.

Two places there are enough, and two barriers: before it writes the row after the next, that warp
has loaded the next row's queries, over those that all others are done with.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any, NamedTuple

from maxattn.kernels.fa4.cute_packages import library_forward

PLACES = 2  # in shared memory
FIRST_BARRIER = 13  # of as many as there are places, behind the library's


class RowsToTake(NamedTuple):
    """Hold what the scheduler gets beside the library's sizes.

    Attributes:
        rows: the array that names the rows in their order; None where none does.
        count: int32 [1], of the rows that were taken after the first ones; begins as 0.
        next_rows: int32 [`PLACES`], in shared memory.
        threads: of the warp that loads and of those that multiply.
        loads: whether the warp is the one that loads.
    """

    rows: Any
    count: Any
    next_rows: Any
    threads: int
    loads: bool


def place_taken(coord: Any) -> Any:
    """Return the place in the order that a thread block takes, from where its scheduler stands."""
    return coord[0]


def take_next(coord: Any, given: RowsToTake) -> tuple[Any, Any, Any]:
    """Return where a scheduler stands next: (place, wave, 0)."""
    (_, wave, rest), (fetch, receive) = coord, _exchange()
    wave = wave + 1
    if given.loads:
        at = fetch(given.count, given.next_rows, wave, given.threads)
    else:
        at = receive(given.next_rows, wave, given.threads)
    return at, wave, rest


@cache
def _exchange() -> tuple[Any, Any]:
    """Make what fetches the number of the next row, and what receives it."""
    cute, number = import_module("cutlass.cute"), import_module("cutlass").Int32
    arch, utils = cute.arch, import_module("fa4_jax.cute.utils")

    @cute.jit
    def fetch(count: Any, next_rows: Any, wave: Any, threads: Any):
        at = number(0)
        if arch.lane_idx() == 0:
            at = arch.grid_dim()[0] + utils.atomic_add_i32(1, count.iterator)
            next_rows[wave % PLACES] = at
        at = arch.shuffle_sync(at, 0)
        full = FIRST_BARRIER + wave % PLACES
        arch.barrier_arrive(barrier_id=full, number_of_threads=threads)
        return at

    @cute.jit
    def receive(next_rows: Any, wave: Any, threads: Any):
        full = FIRST_BARRIER + wave % PLACES
        arch.barrier(barrier_id=full, number_of_threads=threads)
        at = next_rows[wave % PLACES]
        arch.sync_warp()  # one thread says for its warp that the queries are free
        return at

    return fetch, receive


def with_next_rows(persistent: Any, hand: Callable[..., tuple[Any, ...]]) -> Any:
    """Make a persistent forward whose warps hand each other the next row.

    Args:
        persistent: the forward's class, whose scheduler goes on by `take_next`.
        hand: gives the scheduler among a method's operands what it needs.
    """
    cute, cutlass = import_module("cutlass.cute"), import_module("cutlass")

    class Dynamic(persistent):
        def _get_shared_storage_cls(self) -> Any:
            # Behind the barriers there is room: what follows begins at a multiple of 1,024 bytes.
            fields = dict(super()._get_shared_storage_cls()._annotations)
            place = {"next_rows": cute.struct.MemRange[cutlass.Int32, PLACES]}
            barriers = {name: fields.pop(name) for name in list(fields) if "mbar" in name}
            annotations = {"__annotations__": barriers | place | fields}
            storage = cute.struct(type("Storage", (), annotations))
            self.next_after_q = storage._offsets["next_rows"] - storage._offsets["sQ"]
            return storage

        def handed(self, operands: tuple[Any, ...], loads: bool) -> tuple[Any, ...]:
            assert self.use_tma_Q and self.use_tma_KV, "one warp loads"
            queries = operands[_place_of_queries("load" if loads else "mma")].iterator
            start = cute.recast_ptr(queries, dtype=cutlass.Int32) + self.next_after_q // 4
            next_rows = cute.make_tensor(start, cute.make_layout((PLACES,)))
            threads = self.num_mma_threads + cute.arch.WARP_SIZE
            return hand(
                operands, lambda rows, count: RowsToTake(rows, count, next_rows, threads, loads)
            )

    return Dynamic


def _place_of_queries(method: str) -> int:
    """Return which operand of a library's method is the tile of queries in shared memory."""
    found = signature(getattr(library_forward(), method)).parameters
    return list(found).index("sQ") - 1  # after self
