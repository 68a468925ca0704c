"""Print the estimated rates of several kernels for one forward, as a Markdown table:

    MAXDIFFUSION_KERNEL=custom_splash_attention.py python -m benchmarks.tpu_kernels_of_others LOG

MaxDiffusion's kernels are compiled from their source with the tiles of its Wan configs, by `maxattn
compile --kernel-file`. This needs libtpu, and an hour. LOG stores each answer as a line of JSON: a
stopped run continues from it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.kernels_of_others import KERNEL
from benchmarks.tpu_estimates import Estimate, EstimateLog
from maxattn.config import AttentionConfig
from maxattn.tools.compile.job import CompileJob
from maxattn.tools.model_shapes import read

SHAPE = read("wan-14b-720p")
SECONDS = 900.0  # time limit of one compile
FLAG = "--xla_tpu_scoped_vmem_limit_kib=65536"  # as MaxDiffusion's README sets it
CHIPS = {"v6e": "v6e:1x1", "v7x": "tpu7x:1x1x1", "v5p": "v5p:1x1x1"}
YAML = {"block_q": 3024, "block_kv": 2048, "block_kv_compute": 1024}
WHOLE = YAML | {"block_q": 3072}  # its own kernels need multiples of 128
FILE = Path(__file__).with_name("kernels_of_others.py")


class Peer(NamedTuple):
    """One row of the table.

    Args:
        title: the first cell.
        kernel: the kernel's name in maxattn; "" for a function of MaxDiffusion.
        function: a function of kernels_of_others.py.
        is_theirs: whether MaxDiffusion's tiles and limit of VMEM are used.
    """

    title: str
    kernel: str = ""
    function: str = ""
    is_theirs: bool = True

    def job(self, topology: str) -> CompileJob:
        """Return the compile job for a TPU topology."""
        tile = WHOLE if self.function else YAML
        sizes: dict[str, Any] = {"flash_block_sizes": tile} if self.is_theirs else {}
        config = AttentionConfig(attention=self.kernel or "flash", **sizes)
        file = f"{FILE}:{self.function}" if self.function else ""
        return CompileJob(topology, config, SHAPE, devices=1, estimate=True, kernel_file=file)


PEERS = (
    Peer("tpu_flash", "tpu_flash", is_theirs=False),
    Peer("MaxDiffusion, running maximum", function="online"),
    Peer("MaxDiffusion, fixed maximum", function="bounded"),
    Peer("JAX splash, tiles of MaxDiffusion", "flash"),
    Peer("tokamax splash, tiles of MaxDiffusion", "tokamax_flash"),
    Peer("JAX splash, tiles by estimates", "flash", is_theirs=False),
    Peer("tokamax splash, tiles by estimates", "tokamax_flash", is_theirs=False),
    Peer("MaxDiffusion, running maximum, experimental scheduler", function="online_scheduled"),
    Peer("MaxDiffusion, fixed maximum, experimental scheduler", function="bounded_scheduled"),
)


def main() -> None:
    """Compile the kernels that the log lacks, and print the table."""
    assert KERNEL in os.environ, f"set {KERNEL}"
    log, found = EstimateLog(Path(sys.argv[1]), SECONDS), dict[str, list[Estimate]]()
    for peer in PEERS:
        os.environ["LIBTPU_INIT_ARGS"] = FLAG if peer.is_theirs else ""
        its = (log.estimate([chip, peer.title], peer.job(CHIPS[chip])) for chip in CHIPS)
        found[peer.title] = list(its)
    print("| kernel | " + " | ".join(CHIPS) + " |\n" + "|---" * (1 + len(CHIPS)) + "|")
    for title, its in found.items():
        print(f"| {title} | {' | '.join(map(_cell, its))} |")


def _cell(row: Estimate) -> str:
    """Format the rate over unmasked pairs, slow end first."""
    if "failed" in row:
        return row["failed"].split(":")[0]
    pairs = SHAPE.batch * SHAPE.heads * SHAPE.q_len * SHAPE.kv_len
    ends = (sum(k["calls"] * k["seconds"][end] for k in row["kernels"]) for end in (1, 0))
    return " to ".join(f"{4 * pairs * SHAPE.head_dim / seconds / 1e12:.0f}" for seconds in ends)


if __name__ == "__main__":
    main()
