"""One row per kernel: what the config, the plan and the tools know before they import the kernel.

A new kernel needs one file and one row, both of which may be in your own code:

    from maxattn.kernels import table

    table.add(table.KernelRow("plain", "my_kernel:Plain"))  # `attention: plain` is then valid

This module imports no kernel and no jax, so that the config can check names against it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, TypeVar

from maxattn.errors import ConfigError
from maxattn.jax_private.versions import TOKAMAX_ON_GPU

EVERYWHERE = ("cpu", "gpu", "tpu")


@dataclass(frozen=True)
class KernelRow:
    """A kernel: its name, where it runs, and what it needs."""

    name: str  # the kernel's name in `attention:`
    where: str  # "module:Class", imported at its first use
    # platforms, gpus: the platforms that it runs on, and the vendors of its GPUs
    platforms: tuple[str, ...] = EVERYWHERE
    gpus: tuple[str, ...] = ("NVIDIA", "AMD")
    package: str | None = None  # pip's name of the package that it calls; None if jax is enough
    switch: str | None = None  # an environment variable whose value "0" forbids the kernel
    # the settings that this kernel reads, apart from those that every kernel reads
    reads: tuple[str, ...] = ()
    # prefixes of the names of its custom calls in compiled programs
    custom_calls: tuple[str, ...] = ()
    # whether `attention:` takes the name; if not, a setting in `reads` selects it
    is_spelled: bool = True
    title: str = ""  # the kernel's name in messages; default `name`


_NVIDIA = ("NVIDIA",)
_BLOCKWISE = ("use_memory_efficient_attention", "query_chunk_size", "key_chunk_size")
_TOKAMAX = ("use_base2_exp", "use_experimental_scheduler", "flash_block_sizes")
_ROWS = (
    KernelRow("dot_product", "maxattn.kernels.dot_product:DotProduct"),
    KernelRow(
        "memory_efficient", "maxattn.kernels.memory_efficient:MemoryEfficient",
        reads=_BLOCKWISE, is_spelled=False, title="the blockwise dot_product",
    ),
    KernelRow(
        "flash", "maxattn.kernels.flash:Flash", gpus=_NVIDIA,
        reads=("flash_block_sizes",), custom_calls=("tpu_custom_call", "fa4", "__cudnn", "cudnn"),
    ),
    KernelRow(
        "tokamax_flash", "maxattn.kernels.tokamax_flash:TokamaxFlash", gpus=_NVIDIA,
        package="tokamax", reads=_TOKAMAX,
        custom_calls=("tpu_custom_call", "tokamax", "mosaic_gpu"),
    ),
    KernelRow(
        "tpu_flash", "maxattn.kernels.tpu_flash:TpuFlash", ("cpu", "tpu"),
        reads=("flash_block_sizes",), custom_calls=("tpu_custom_call",),
    ),
    KernelRow(
        "tpu_few_keys", "maxattn.kernels.tpu_few_keys:TpuFewKeys", ("cpu", "tpu"),
        custom_calls=("tpu_custom_call",),
    ),
    KernelRow(
        "cudnn_flash_te", "maxattn.kernels.cudnn_flash_te:CudnnFlashTe", ("gpu",), _NVIDIA,
        package="transformer-engine-jax", switch="NVTE_FUSED_ATTN", custom_calls=("te_",),
    ),
    KernelRow(
        "cudnn", "maxattn.kernels.cudnn:Cudnn", ("gpu",), _NVIDIA,
        custom_calls=("__cudnn", "cudnn"),
    ),
)  # fmt: skip

# pip's name -> (the extra of maxattn that installs it, a version that works with every kernel).
EXTRAS = {
    "tokamax": ("tokamax", TOKAMAX_ON_GPU),
    "transformer-engine-jax": ("te", "2.20.2"),
    "fa4-jax": ("fa4", "0.1.0"),
}


# ---- rows by name --------------------------------------------------------------------------------


class TableRow(Protocol):
    """A row of a table: a name, "module:Class", and the settings that it reads."""

    @property
    def name(self) -> str: ...
    @property
    def where(self) -> str: ...
    @property
    def reads(self) -> tuple[str, ...]: ...


R = TypeVar("R", bound=TableRow)


class Table(dict[str, R]):
    """The rows of a table by name, in the order in which they were added.

    Args:
        kind: what a row describes, in one word, for error messages.
        rows: the rows to begin with.
    """

    def __init__(self, kind: str, rows: tuple[R, ...]) -> None:
        super().__init__((row.name, row) for row in rows)
        self.kind = kind

    def add(self, row: R) -> None:
        """Add a row; a config may then use its name.

        Raises:
            ConfigError: another row has the name.
        """
        if row.name in self:
            rule = f"another {self.kind} has this name"
            raise ConfigError(self.kind, row.name, rule, "use another name, or remove that row")
        self[row.name] = row

    def remove(self, name: str) -> None:
        """Remove a row that `add` added."""
        del self[name]

    def readers(self) -> dict[str, tuple[R, ...]]:
        """Return a mapping from each setting to the rows that read it."""
        settings = dict.fromkeys(setting for row in self.values() for setting in row.reads)
        return {s: tuple(row for row in self.values() if s in row.reads) for s in settings}


class Classes(Mapping[str, Any]):
    """A mapping from a row's name to its class, which is imported when it is looked up."""

    def __init__(self, table: Table[Any]) -> None:
        self._table = table

    def __getitem__(self, name: str) -> Any:
        module, _, cls = self._table[name].where.partition(":")
        return getattr(import_module(module), cls)

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


# ---- the kernels ---------------------------------------------------------------------------------

TABLE: Table[KernelRow] = Table("kernel", _ROWS)
add, remove = TABLE.add, TABLE.remove


def spellings() -> tuple[str, ...]:
    """Return the kernels' names that `attention:` takes."""
    return tuple(row.name for row in TABLE.values() if row.is_spelled)


def packages() -> tuple[str, ...]:
    """Return pip's names of all packages that kernels call."""
    needed = (row.package for row in TABLE.values() if row.package)
    return tuple(dict.fromkeys((*EXTRAS, *needed)))


def switches() -> tuple[str, ...]:
    """Return the environment variables whose value "0" forbids a kernel."""
    return tuple(row.switch for row in TABLE.values() if row.switch)


def custom_calls() -> tuple[str, ...]:
    """Return the name prefixes of all kernels' custom calls."""
    return tuple(dict.fromkeys(call for row in TABLE.values() for call in row.custom_calls))
