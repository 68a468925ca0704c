"""A compiled program's kernels, priced, and the cycles that XLA expects of its own operations."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from maxattn.devices import Device
from maxattn.tools.compile.hlo import HloProgram
from maxattn.tools.estimate.bundles import unknown
from maxattn.tools.estimate.kernel import KernelDump, KernelEstimate, core_of
from maxattn.tools.estimate.tiles import KernelTiles, Phase

NOT_COUNTED = 2**63 - 1  # what libtpu writes as the cycles of an operation that it does not price
LONGEST = 3  # operations of XLA's own that an estimate names
_PALLAS = 'custom_call_target="tpu_custom_call"'
_BODY = re.compile(r'"body":"([^"]*)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_BUNDLES = re.compile(r"\d+-(.+)-\d+-final_bundles\.txt")
_SLOTS = re.compile(r"\d+-(.+)-\d+-final_hlo-static-per-bundle-utilization\.txt")


def dump_flags(folder: Path) -> str:
    """Return what makes libtpu write the final bundles of all that it compiles into a folder."""
    final = "--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final"
    # Without the category it writes what it was before registers were assigned too, twice as much.
    return f"--xla_jf_dump_to={folder} {final} --xla_jf_dump_category_filter=codegen"


def estimate_of(
    text: str,
    folder: Path,
    device: Device,
    tiles: Mapping[Phase, KernelTiles],
    forward_flops: float = 0.0,
) -> dict[str, Any]:
    """Price a compiled program.

    Args:
        text: `compiled.as_text()`.
        folder: where libtpu wrote its dumps.
        device: what the program is for.
        tiles: what each kernel computes.
        forward_flops: of a forward without a plan: if one kernel computes it, its rate is known.

    Returns:
        plain values: `how`, the words that stand beside every number; `libtpu`, its version;
        `kernels`, a `KernelEstimate` each; `xla_seconds`, what XLA's own operations take;
        `xla_longest`, (name, seconds) of those that take longest; `xla_unknown`, the names of those
        that libtpu gives no time for.
    """
    version = metadata.version("libtpu")
    kernels = list[KernelEstimate]()
    dumps = Dumps.of(folder, version)
    for call in pallas_calls(HloProgram.read(text)):
        dump = KernelDump.read(call.name, *dumps.texts(call.twins), device, version)
        kernels.append(dump.estimate(tiles.get(dump.phase) if dump.phase else None, call.times))
    if forward_flops and len(kernels) == 1:
        kernels = [kernels[0]._replace(flops=forward_flops / kernels[0].calls)]
    return how_of(version) | {"kernels": [k._asdict() for k in kernels]} | xla_of(text, device)


def how_of(version: str) -> dict[str, str]:
    """Return the words beside every number, and the version of libtpu."""
    return {"how": f"estimated by libtpu {version}'s schedule, not run", "libtpu": version}


def xla_of(text: str, device: Device) -> dict[str, Any]:
    """Return what XLA expects of a program's own operations, as `estimate_of` does."""
    core = core_of(device)
    every = sorted(_xla_cycles(HloProgram.read(text)), key=lambda pair: -pair[1])
    own = [pair for pair in every if pair[1] < NOT_COUNTED]
    return {
        "xla_seconds": sum(cycles for _, cycles in own) / core.clock,
        "xla_longest": [(name, cycles / core.clock) for name, cycles in own[:LONGEST]],
        "xla_unknown": [name for name, cycles in every if cycles >= NOT_COUNTED],
    }


class PallasCall(NamedTuple):
    """Hold one call of a Pallas kernel.

    Args:
        name: the instruction's.
        times: how often the program runs it.
        twins: it and the others with the same kernel; libtpu writes the schedule of one of them.
    """

    name: str
    times: int
    twins: tuple[str, ...]


def pallas_calls(program: HloProgram) -> Iterator[PallasCall]:
    """Yield the calls of Pallas kernels that a program has."""
    found = [
        (one.name, program.times(name), _BODY.search(one.rest))
        for name, body in program.computations.items()
        for one in body
        if one.opcode == "custom-call" and _PALLAS in one.rest
    ]
    kernels = {name: body.group(1) if body else name for name, _, body in found}
    for name, times, _ in found:
        others = (other for other, body in kernels.items() if body == kernels[name])
        yield PallasCall(name, times, (name, *(other for other in others if other != name)))


@dataclass(frozen=True)
class Dumps:
    """Hold the files that libtpu wrote, by the instruction that they are of.

    Args:
        bundles, slots: the last file of each, where it was compiled more than once.
        libtpu: its version.
    """

    bundles: Mapping[str, Path]
    slots: Mapping[str, Path]
    libtpu: str

    @staticmethod
    def of(folder: Path, libtpu: str) -> Dumps:
        """List a folder."""
        paths = sorted(folder.glob("*.txt"))
        bundles, slots = (
            {found.group(1): path for path in paths if (found := form.fullmatch(path.name))}
            for form in (_BUNDLES, _SLOTS)
        )
        return Dumps(bundles, slots, libtpu)

    def texts(self, names: tuple[str, ...]) -> tuple[str, str]:
        """Return the bundles and the table of slots of the first of the names that has both."""
        for name in names:
            if name in self.bundles and name in self.slots:
                bundles, slots = (
                    files[name].read_text(encoding="utf-8", errors="replace")
                    for files in (self.bundles, self.slots)
                )
                return bundles, slots
        rule = f"it has no file ...-final_bundles.txt of the kernel {names[0]}"
        raise unknown(f"libtpu {self.libtpu}'s dump", rule)


def _xla_cycles(program: HloProgram) -> Iterator[tuple[str, int]]:
    """Yield the name of each operation of XLA's own, and the cycles that it expects of it.

    What is inside a fusion counts with the fusion, and a loop's body as often as it runs.
    """
    every = [i for body in program.computations.values() for i in body]
    fused = {name for i in every if i.opcode == "fusion" for name in i.called}
    for name, body in program.computations.items():
        for one in body if name not in fused else ():
            if found := _CYCLES.search(one.rest):
                yield one.name, program.times(name) * int(found.group(1))
