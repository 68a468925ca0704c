"""Measure what the bound on VMEM costs: how many requests that the compiler takes are changed all
the same.

MAXATTN_TPU_PYTHON=... python -m tests.block_sizes.share [how many random requests]; default 330,
those of the tests.
"""

from __future__ import annotations

import sys

from tests.block_sizes.compiler import Compiler
from tests.block_sizes.random_requests import requests
from tests.block_sizes.test_compiles import COUNT


def main(count: int) -> None:
    """Compile, as they were before the rules of VMEM, the requests that those rules changed; print
    the share.
    """
    drawn = list(requests("random requests", count))
    changed = [request for request in drawn if request.adjusted() != request.without_vmem()]
    taken = 0
    with Compiler() as compiler:
        for n, request in enumerate(changed, 1):
            taken += compiler.compile(request.case(request.without_vmem()))["ok"]
            print(f"{n} of {len(changed)} that VMEM changed: {taken} compile unchanged", flush=True)
    fine = count - len(changed) + taken
    print(
        f"{taken} of {fine} requests that compile are changed ({taken / fine:.0%}); {count} were"
        " drawn"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else COUNT)
