"""The operations of CuTe that the norm kernels use, on numpy.

A value in a kernel is an array over the threads of one block, which run in lockstep; blocks run one
after another. Every load and store is checked: it is in bounds, its address has the promised
alignment, and threads that store to one address store equal values.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

KERNELS = tuple(f"maxattn.modules.row_kernel.{name}" for name in ("thread", "kernel"))


class Kind:
    """A dtype of CuTe."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)
        self.width = 8 * self.dtype.itemsize

    def __call__(self, x: Any) -> Any:
        return np.asarray(x, self.dtype)


FLOAT32 = Kind(np.float32)
KINDS = {kind.dtype: kind for kind in (FLOAT32, Kind(np.float16), Kind(ml_dtypes.bfloat16))}


class Pointer:
    def __init__(self, numbers: np.ndarray, offset: Any = 0) -> None:
        self.numbers, self.offset = numbers, offset

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.numbers, self.offset + more)

    def toint(self) -> Pointer:
        return self


class Memory:
    """An array in the GPU's memory."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape, self.element_type = array, array.shape, KINDS[array.dtype]
        self.iterator = Pointer(array.reshape(-1))

    def __getitem__(self, index: Any) -> Any:
        return self.array[index]

    def __setitem__(self, index: Any, value: np.ndarray) -> None:
        assert (value == value.flat[0]).all(), "threads store different numbers to one place"
        self.array[index] = value.flat[0]


class Registers:
    def __init__(self, data: np.ndarray) -> None:
        self.data, self.shape = data, data.shape[1]

    def load(self) -> Registers:
        return Registers(self.data.copy())

    def to(self, kind: Kind) -> Registers:
        return Registers(self.data.astype(kind.dtype))

    def store(self, other: Registers) -> None:
        assert self.data.dtype == other.data.dtype
        self.data[:] = other.data

    def __getitem__(self, i: int) -> np.ndarray:
        return self.data[:, i].copy()

    def __setitem__(self, i: int, value: np.ndarray) -> None:
        self.data[:, i] = value


class Shared:
    """Shared memory for sums of warps: [2, warps], or [2, 2, warps]."""

    def __init__(self, shape: tuple[int, ...], threads: int) -> None:
        self.data, self.threads = np.full(shape, np.nan, np.float32), threads

    def __getitem__(self, index: tuple[int, ...]) -> np.ndarray:
        return np.full(self.threads, self.data[index])

    def __setitem__(self, index: tuple[Any, ...], value: np.ndarray) -> None:
        self.data[index] = value
        assert (self.data[index] == value).all(), "threads of a warp store different numbers"


class Machine:
    """The state of one launch: its threads, its grid, the current block."""

    def __init__(self) -> None:
        self.threads = self.grid = self.block = 0
        self.started: list[tuple[Any, Any]] = []
        self.groups: list[list[tuple[Any, Any]]] = []

    def kernel(self, method: Any) -> Any:
        def launched(*operands: Any) -> Any:
            def launch(grid: list[int], block: list[int], **_: Any) -> None:
                self.threads, self.grid = block[0], int(grid[0])
                for index in range(self.grid):
                    self.block, self.started, self.groups = index, [], []
                    method(*operands)

            return SimpleNamespace(launch=launch)

        return launched

    def registers(self, n: int, kind: Kind) -> Registers:
        return Registers(np.full((self.threads, n), np.nan, kind.dtype))

    def copy(self, source: Any, target: Any) -> None:
        if isinstance(target, Registers):
            target.data[:] = source[0].numbers[self._places(*source)]
        else:
            places = self._places(*target)
            target[0].numbers[places] = source.data
            assert (target[0].numbers[places] == source.data).all(), "threads store differently"

    def shared(self, kind: Kind, layout: Any, align: int) -> Any:
        if isinstance(layout, tuple):
            return Shared(layout, self.threads)
        return Memory(np.full(layout, np.nan, kind.dtype))

    def start(self, atom: int, source: Any, target: Any) -> None:
        """Record an asynchronous copy; it is performed only when it is waited for."""
        assert atom in (32, 64, 128) and atom == 8 * source[0].numbers.itemsize * source[1]
        self.started.append((source, target))

    def commit(self) -> None:
        self.groups.append(self.started)
        self.started = []

    def wait(self, most: int) -> None:
        while len(self.groups) > most:
            for (source, n), (target, m) in self.groups.pop(0):
                numbers = source.numbers[self._places(source, n)]
                target.numbers[self._places(target, m)] = numbers

    def _places(self, pointer: Pointer, n: int) -> np.ndarray:
        first = np.broadcast_to(pointer.offset, (self.threads,))
        assert first.min() >= 0 and first.max() + n <= pointer.numbers.size, "outside of the array"
        return first[:, None] + np.arange(n)

    def butterfly(self, x: np.ndarray, offset: int) -> np.ndarray:
        return x.reshape(-1, 32)[:, np.arange(32) ^ offset].reshape(-1)


def _aligned(kind: Kind, pointer: Pointer, memory: Any, assumed_align: int) -> Pointer:
    address = np.asarray(pointer.offset) * pointer.numbers.itemsize
    assert (address % assumed_align == 0).all(), "an address that is less even than promised"
    assert pointer.numbers.dtype == kind.dtype
    return pointer


def modules() -> dict[str, ModuleType]:
    """Make the packages that the kernels import."""
    machine = Machine()
    names = "", ".cute", ".memory", ".cute.nvgpu", ".cute.nvgpu.cpasync"
    cutlass, cute, memory, nvgpu, cpasync = (ModuleType(f"cutlass{part}") for part in names)
    arch = SimpleNamespace(
        thread_idx=lambda: (np.arange(machine.threads), 0, 0),
        block_idx=lambda: (machine.block, 0, 0),
        grid_dim=lambda: (machine.grid, 1, 1),
        warp_idx=lambda: np.arange(machine.threads) // 32,
        sync_threads=lambda: None,
        shuffle_sync_bfly=machine.butterfly,
        cp_async_commit_group=machine.commit,
        cp_async_wait_group=machine.wait,
    )
    vars(cute).update(
        arch=arch,
        jit=lambda method: method,
        kernel=machine.kernel,
        math=SimpleNamespace(rsqrt=lambda x, fastmath: (1 / np.sqrt(x)).astype(np.float32)),
        size=lambda n: n,
        make_layout=lambda n, stride=None: n,
        make_rmem_tensor=machine.registers,
        make_ptr=_aligned,
        make_tensor=lambda pointer, n: (pointer, n),
        autovec_copy=machine.copy,
        AddressSpace=SimpleNamespace(gmem="gmem", smem="smem"),
        make_copy_atom=lambda op, kind, num_bits_per_copy: num_bits_per_copy,
        copy=machine.start,
    )
    vars(cpasync).update(
        CopyG2SOp=lambda mode: mode, LoadCacheMode=SimpleNamespace(GLOBAL="global", ALWAYS="always")
    )
    allocate = SimpleNamespace(allocate_tensor=machine.shared)
    vars(memory).update(SmemAllocator=lambda: allocate)
    vars(cutlass).update(
        cute=cute, memory=memory, Float32=FLOAT32, Int32=int, Int64=lambda x: x, range=range,
        const_expr=bool, min=np.minimum, max=np.maximum, select_=np.where,
    )  # fmt: skip
    return {module.__name__: module for module in (cutlass, cute, memory, nvgpu, cpasync)}


@contextmanager
def on_numpy() -> Iterator[None]:
    """Replace the packages during the kernels' import; unload the kernels afterwards."""
    before = {name: sys.modules.pop(name, None) for name in (*modules(), *KERNELS)}
    sys.modules.update(modules())
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
