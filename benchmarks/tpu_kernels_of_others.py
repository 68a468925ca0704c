"""Print the estimated rates of several kernels for one forward, as a Markdown table:

    MAXDIFFUSION_KERNEL=custom_splash_attention.py python -m benchmarks.tpu_kernels_of_others LOG

MaxDiffusion's kernels are compiled from their source with the tiles of its Wan configs, by `maxattn
compile --kernel-file`. This needs libtpu, and an hour. LOG stores each answer as a line of JSON: a
stopped run continues from it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.maxdiffusion_kernels import KEY
from maxattn.config import AttentionConfig
from maxattn.tools.compile.job import CompileJob, run_in_child
from maxattn.tools.model_shapes import read

SHAPE = read("wan-14b-720p")
SECONDS = 900.0  # time limit of one compile
FLAG = "--xla_tpu_scoped_vmem_limit_kib=65536"  # as MaxDiffusion's README sets it
CHIPS = {"v6e": "v6e:1x1", "v7x": "tpu7x:1x1x1", "v5p": "v5p:1x1x1"}
YAML = {"block_q": 3024, "block_kv": 2048, "block_kv_compute": 1024}
WHOLE = YAML | {"block_q": 3072}  # its own kernels need multiples of 128
FILE = Path(__file__).with_name("maxdiffusion_kernels.py")


class Peer(NamedTuple):
    """One row of the table.

    Args:
        title: the first cell.
        kernel: the kernel's name in maxattn; "" for a function of MaxDiffusion.
        function: a function of maxdiffusion_kernels.py.
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
    log, found = Path(sys.argv[1]), dict[tuple[str, str], dict[str, Any]]()
    assert KEY in os.environ, f"set {KEY}"
    for line in log.read_text().splitlines() if log.exists() else ():
        kept = json.loads(line)
        found[kept["chip"], kept["title"]] = kept
    for peer in PEERS:
        for chip in CHIPS:
            if (chip, peer.title) not in found:
                found[chip, peer.title] = made = _priced(chip, peer)
                with log.open("a") as file:
                    file.write(json.dumps(made) + "\n")
    print("| kernel | " + " | ".join(CHIPS) + " |\n" + "|---" * (1 + len(CHIPS)) + "|")
    for peer in PEERS:
        cells = (_cell(found[chip, peer.title]) for chip in CHIPS)
        print(f"| {peer.title} | {' | '.join(cells)} |")


def _priced(chip: str, peer: Peer) -> dict[str, Any]:
    """Compile one kernel in a child process, and store the answer in the log."""
    os.environ["LIBTPU_INIT_ARGS"] = FLAG if peer.is_theirs else ""
    outcome = run_in_child(peer.job(CHIPS[chip]), SECONDS)
    made = outcome.estimate
    row = {"chip": chip, "title": peer.title, "compiled_seconds": round(outcome.seconds, 1)}
    if outcome.ending != "compiled" or "refused" in made:
        return row | {"failed": made.get("refused") or f"{outcome.ending}: {outcome.message[:600]}"}
    sizes = [line.strip() for line in outcome.plan.splitlines() if "blocks " in line]
    return row | {"libtpu": made["libtpu"], "kernels": made["kernels"], "blocks": sizes}


def _cell(row: dict[str, Any]) -> str:
    """Format the rate over real pairs, slow end first."""
    if "failed" in row:
        return row["failed"].split(":")[0]
    pairs = SHAPE.batch * SHAPE.heads * SHAPE.q_len * SHAPE.kv_len
    ends = (sum(k["calls"] * k["seconds"][end] for k in row["kernels"]) for end in (1, 0))
    return " to ".join(f"{4 * pairs * SHAPE.head_dim / seconds / 1e12:.0f}" for seconds in ends)


if __name__ == "__main__":
    main()
