"""Time the attention of forty model calls in an old checkout and in a new one, in one run.

    python benchmarks/model_calls.py --old ../main-before --rounds 4 --json rows.json

Workers of both checkouts share one GPU: all compile first, then an old and a new worker time the
same call in turns. The report has new / old for every call, and whether the change passes the gate.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from statistics import geometric_mean, median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import workers
from forty_calls import ModelCall, model_calls
from workers import Remote

HERE = Path(__file__).resolve()
FORWARD, BOTH = "forward", "forward + backward"
PASSES = (FORWARD, BOTH)
# The gate. The last number is for cross-attention: a share of its model's step.
MOST_GEOMEAN, MOST_SELF, MOST_OF_STEP = 1.01, 1.03, 0.005
# How far the rounding of bfloat16 moves two right results apart: all entries, and any 64 tokens.
MOST_ERROR, MOST_ERROR_OF_64 = 0.02, 0.1
COMPILING = 0.6  # share of the limit; calls that are not compiled by then are left out


# ---- a worker, which imports the maxattn of one checkout -----------------------------------------


class Worker:
    """The compiled programs of some calls, and the inputs of the call that is timed."""

    def __init__(self, kernel: str, tiny: bool) -> None:
        import jax

        import maxattn as ma

        self.jax, self.ma, self.tree = jax, ma, str(Path(ma.__file__).parents[1])
        self.config = ma.AttentionConfig.from_overrides(
            [f"attention={kernel}", f"cross_attention={kernel}"]
        )
        self.calls = {call.name: call for call in model_calls(tiny)}
        self.programs: dict[tuple[str, str], Any] = {}
        self.operands: tuple[Any, ...] = ()

    def about(self) -> dict[str, str]:
        device = self.jax.devices()[0]
        return {"tree": self.tree, "device": device.device_kind, "jax": self.jax.__version__}

    def load(self, name: str) -> None:
        """Compile both passes of a call in parallel."""
        with ThreadPoolExecutor(2) as pool:
            compiled = pool.map(partial(self._compiled, self.calls[name]), PASSES)
            for what, each in zip(PASSES, compiled, strict=True):
                self.programs[name, what] = each

    def draw(self, name: str, folder: str) -> dict[str, float]:
        """Make a call's inputs, run both passes, and store their results for the comparison.

        Returns:
            The seconds of a program, by pass.
        """
        call, seconds, results = self.calls[name], {}, []
        self.operands = ()  # frees the memory of the previous call
        self.operands = (*self.jax.jit(partial(self._random, call))(), self._mask(call))
        for what in PASSES:
            program = self.programs[name, what]
            results += map(self._projected, program(*self.operands)[:-1])
            start = perf_counter()
            self.jax.block_until_ready(program(*self.operands))
            seconds[what] = perf_counter() - start
        np.savez(Path(folder) / "results.npz", *results)
        return seconds

    def time(self, name: str, what: str, times: int) -> float:
        """Return the seconds of one call, from `times` queued programs."""
        program = self.programs[name, what]
        start = perf_counter()
        for _ in range(times - 1):
            program(*self.operands)
        self.jax.block_until_ready(program(*self.operands))
        return (perf_counter() - start) / times / self._chained(self.calls[name], what)

    def _compiled(self, call: ModelCall, what: str) -> Any:
        jax = self.jax
        masks = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self._mask(call))
        specs = (*jax.eval_shape(partial(self._random, call)), masks)
        program = partial(self._several, call, what)
        # No CUDA graphs, so that both checkouts launch kernels one by one; no Triton, so that XLA
        # chooses cuBLAS for the matrix products of a bias, fast and the same in both.
        options = {"xla_gpu_enable_command_buffer": "", "xla_gpu_enable_triton_gemm": False}
        options = options if jax.default_backend() == "gpu" else {}
        return jax.jit(program).lower(*specs).compile(options)

    def _several(self, call: ModelCall, what: str, *operands: Any) -> Any:
        """Chain calls, so that the host's dispatch is hidden; return the results of the last.

        The inputs of each call pass a barrier together with an entry of the previous results, so
        that XLA neither merges calls nor moves one out of the loop. The program returns the entry
        too, since XLA would drop the loop otherwise.
        """
        lax, jnp, once = self.jax.lax, self.jax.numpy, partial(self._once, call, what)

        def again(_: Any, token: Any) -> Any:
            inputs, token = lax.optimization_barrier((operands, token))
            results = lax.optimization_barrier(once(*inputs))
            return 0 * token + sum(x[(0,) * x.ndim].astype(jnp.float32) for x in results)

        token = lax.fori_loop(0, self._chained(call, what) - 1, again, jnp.float32(0))
        inputs, token = lax.optimization_barrier((operands, token))
        return *once(*inputs), token

    def _once(self, call: ModelCall, what: str, *operands: Any) -> tuple[Any, ...]:
        q, k, v, dout, bias, mask = operands
        settings = {"mask": mask, "bias": bias, "config": self.config, "role": call.role}
        attend = partial(self.ma.attention, **settings)
        if what == FORWARD:
            return (attend(q, k, v),)
        out, gradient = self.jax.vjp(attend, q, k, v)
        return (out, *gradient(dout))

    def _chained(self, call: ModelCall, what: str) -> int:
        """Return how many calls a program chains: about 3 ms of them, and at most 20."""
        if self.jax.default_backend() == "cpu":
            return 2
        b, t, s, n, h = call.shape[:5]
        seconds = 4 * b * t * s * n * h * call.kept / 5e14 + 4 * b * (t + s) * n * h / 2e12
        return max(1, min(20, round(3e-3 / seconds / (1 if what == FORWARD else 3.5))))

    def _mask(self, call: ModelCall) -> Any:
        mask = call.mask(self.ma.masks) if call.mask else None
        return self.jax.tree.map(self.jax.numpy.asarray, mask)

    def _random(self, call: ModelCall) -> tuple[Any, ...]:
        """Draw q, k, v, dout and the bias."""
        b, t, s, n, h = call.shape[:5]
        q, kv = (b, t, n, h), (b, s, call.shape[-1] if len(call.shape) == 6 else n, h)
        keys = self.jax.random.split(self.jax.random.key(0), 5)
        draw = partial(self.jax.random.normal, dtype=call.dtype)
        arrays = [draw(key, dims) for key, dims in zip(keys, (q, kv, kv, q), strict=False)]
        return (*arrays, draw(keys[4], call.bias) if call.bias else None)

    def _projected(self, x: Any) -> Any:
        """Project a result [B, T, N, H] onto a fixed direction: [B, T, N]."""
        direction = np.cos(np.arange(x.shape[-1]) ** 2.0).astype(np.float32)
        # A sum and no product: XLA takes long to choose a kernel for one.
        project = self.jax.jit(lambda x: (x.astype(np.float32) * direction).sum(-1))
        return np.asarray(project(x))


# ---- the parent, which asks an old and a new worker in turns -------------------------------------


class Row(NamedTuple):
    """The times of a call: seconds of (old, new) by pass and round, or why there are none."""

    call: ModelCall
    rounds: dict[str, list[tuple[float, float]]]
    error: float = 0.0
    failed: str = ""

    def ms(self, what: str) -> tuple[float, float]:
        """Return the median milliseconds of (old, new)."""
        old, new = zip(*self.rounds[what], strict=True)
        return 1e3 * median(old), 1e3 * median(new)

    def ratio(self, what: str) -> float:
        """Return the median over rounds of new / old."""
        return median(new / old for old, new in self.rounds[what])

    def is_slower(self, what: str) -> bool:
        """Check whether the ratio fails the gate."""
        if self.call.role == "cross":
            return (self.ratio(what) - 1) * self.call.share > MOST_OF_STEP
        return self.ratio(what) > MOST_SELF


def measure(args: argparse.Namespace, calls: Sequence[ModelCall]) -> tuple[dict, list[Row]]:
    """Time calls in both checkouts; return facts about the run, and a row for each call."""
    count = min(workers.count(args.workers, each=2), len(calls))
    trees = Path(args.old).resolve(), Path(args.new).resolve()
    start = perf_counter()
    script = [str(HERE), "--worker", "--kernel", args.kernel, *["--tiny"] * args.tiny]
    pairs = [[Remote(script, tree) for tree in trees] for _ in range(count)]
    remotes = [remote for pair in pairs for remote in pair]
    timer = threading.Timer(args.limit, lambda: [r.process.kill() for r in remotes])
    timer.start()
    try:
        about = [remote.ask("about") for remote in pairs[0]]
        for tree, said in zip(trees, about, strict=True):
            if Path(said["tree"]).resolve() != tree:
                raise SystemExit(f"{tree}: maxattn was imported from {said['tree']}")
        # A process does not give memory back, so one pair of workers gets all large calls.
        names = [[] for _ in pairs]
        for i, call in enumerate(
            sorted(calls, key=lambda call: -prod(call.shape[:2]) * call.shape[3])
        ):
            names[i * count // len(calls)].append(call.name)
        its = {name: pair for pair, each in zip(pairs, names, strict=True) for name in each}
        failed = _loaded(pairs, names, COMPILING * args.limit)
        print(f"compiled {len(calls)} calls twice in {perf_counter() - start:.0f} s", flush=True)
        rows = []
        for call in calls:
            why = failed.get(call.name, "")
            rows.append(Row(call, {}, failed=why) if why else _timed(its[call.name], call, args))
            print(line(rows[-1]), flush=True)
        print(f"all in {perf_counter() - start:.0f} s", flush=True)
        return {"old": about[0], "new": about[1], "kernel": args.kernel}, rows
    finally:
        timer.cancel()
        for remote in remotes:
            remote.end()


def _loaded(pairs: list[list[Remote]], names: list[list[str]], limit: float) -> dict[str, str]:
    """Compile in all workers in parallel; return by name why some calls failed."""
    failed: dict[str, str] = {}
    until = perf_counter() + limit

    def load(which: int, its: list[str], remote: Remote) -> None:
        for name in its:
            try:
                if perf_counter() > until:
                    raise RuntimeError(f"not compiled within {limit:.0f} s")
                remote.ask("load", name)
            except RuntimeError as error:
                failed[name] = f"{('old', 'new')[which]}: {error}"

    jobs = []
    with ThreadPoolExecutor(2 * len(pairs)) as pool:
        for pair, its in zip(pairs, names, strict=True):
            jobs += [pool.submit(load, i, its, remote) for i, remote in enumerate(pair)]
    for job in jobs:
        job.result()
    return failed


def _timed(pair: list[Remote], call: ModelCall, args: argparse.Namespace) -> Row:
    """Time both passes of a call in turns, and twice more if the first rounds fail the gate."""
    try:
        with tempfile.TemporaryDirectory() as old, tempfile.TemporaryDirectory() as new:
            folders = old, new
            once = [r.ask("draw", call.name, f) for r, f in zip(pair, folders, strict=True)]
            error = _error(*(Path(folder) / "results.npz" for folder in folders))
        row = Row(call, {what: [] for what in PASSES}, error)
        for what in PASSES:
            times = max(1, round(args.seconds / min(each[what] for each in once)))
            for again in range(3):
                if again == 0 or row.is_slower(what):
                    row.rounds[what].extend(_rounds(pair, (call.name, what, times), args.rounds))
        return row
    except RuntimeError as error:
        return Row(call, {}, failed=str(error))


def _rounds(
    pair: list[Remote], request: tuple[str, str, int], rounds: int
) -> Iterator[tuple[float, float]]:
    """Yield seconds of (old, new), each timed twice: old, new, new, old, then new, old, old, new.

    The two in the middle run on a warmer GPU, where the same program was 1 to 3% slower in a
    forward (H100), so both checkouts are in the middle equally often.
    """
    for i in range(rounds + rounds % 2):
        seconds: dict[int, list[float]] = {0: [], 1: []}
        for which in (0, 1, 1, 0) if i % 2 == 0 else (1, 0, 0, 1):
            seconds[which].append(pair[which].ask("time", *request))
        yield sum(seconds[0]) / 2, sum(seconds[1]) / 2


def _error(old: Path, new: Path) -> float:
    """Return the distance of two results; above 1 they do not agree."""
    worst = 0.0
    with np.load(old) as a, np.load(new) as b:
        for name in a:
            x, y = (f[name].reshape(f[name].shape[0], f[name].shape[1], -1) for f in (a, b))
            apart, size = np.square(x - y).sum(-1), np.square(x).sum(-1)
            starts = np.arange(0, x.shape[1], 64)
            apart, size = (np.add.reduceat(z, starts, axis=1) for z in (apart, size))
            all_of_it = np.sqrt(apart.sum() / size.sum()) / MOST_ERROR
            of_64 = np.sqrt(apart / np.maximum(size, 0.01 * size.mean())).max() / MOST_ERROR_OF_64
            worst = max(worst, *(float(np.nan_to_num(z, nan=1e9)) for z in (all_of_it, of_64)))
    return worst


# ---- the report ----------------------------------------------------------------------------------

HEAD = f"{'ms':18}{'forward old':>15}{'new':>10}{'ratio':>7}{'both old':>13}{'new':>10}{'ratio':>7}"


def line(row: Row) -> str:
    """Format the row of a call."""
    if row.failed:
        return f"{row.call.name:18} failed: {row.failed}"
    (f_old, f_new), (b_old, b_new) = map(row.ms, PASSES)
    forward, both = (f"{row.ratio(p):.3f}{'!' if row.is_slower(p) else ' '}" for p in PASSES)
    apart = f"  results differ: {row.error:.1f} of what rounding allows" if row.error > 1 else ""
    times = f"{f_old:14.4f} {f_new:9.4f} {forward:>7}{b_old:12.4f} {b_new:9.4f} {both:>7}"
    return f"{row.call.name:18} {times}{apart}"


def verdict(rows: Sequence[Row]) -> tuple[list[str], bool]:
    """Return the summary of all rows, and whether they pass the gate."""
    timed, lines = [row for row in rows if not row.failed], []
    reasons = [f"{row.call.name} failed" for row in rows if row.failed]
    reasons += [f"{row.call.name}: results differ" for row in timed if row.error > 1]
    for what in PASSES if timed else ():
        ratios = {row.call.name: row.ratio(what) for row in timed}
        mean, worst = geometric_mean(ratios.values()), max(ratios, key=ratios.__getitem__)
        lines.append(f"{what}: geomean {mean:.4f}, worst {ratios[worst]:.3f} ({worst})")
        reasons += [f"{what}: geomean above {MOST_GEOMEAN}"] if mean > MOST_GEOMEAN else []
        reasons += [f"{row.call.name}: {what}" for row in timed if row.is_slower(what)]
    passes = bool(timed) and not reasons
    return [*lines, "gate: passes" if passes else f"gate: fails ({'; '.join(reasons)})"], passes


def to_json(about: dict[str, Any], rows: Sequence[Row]) -> str:
    """Format the rounds as JSON, one call a line."""
    lines = [
        json.dumps({"call": r.call.name, "rounds": r.rounds, "error": r.error, "failed": r.failed})
        for r in rows
    ]
    return f'{{"about": {json.dumps(about)},\n "rows": [\n  ' + ",\n  ".join(lines) + "\n]}\n"


def main() -> int:
    """Time the chosen calls, print the report, and return 1 if the gate fails."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--old", help="a checkout of the commit before")
    parser.add_argument("--new", default=str(HERE.parents[1]), help="default: this checkout")
    parser.add_argument("--only", default="", help="names of calls, separated by commas")
    parser.add_argument("--kernel", default="flash", help="or auto")
    parser.add_argument("--rounds", type=int, default=4, help="rounds, raised to an even number")
    parser.add_argument("--seconds", type=float, default=0.1, help="seconds of a call in a round")
    parser.add_argument("--limit", type=float, default=460, help="seconds of the whole run")
    parser.add_argument(
        "--workers", type=int, default=0, help="workers of a checkout; 0: by the cores"
    )
    parser.add_argument("--json", help="file to write all rounds to")
    parser.add_argument("--tiny", action="store_true", help="short lengths, for a CPU")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        workers.serve(Worker(args.kernel, args.tiny))
        return 0
    if not args.old:
        parser.error("give --old, a checkout of the commit before")
    all_calls = {call.name: call for call in model_calls(args.tiny)}
    names = args.only.split(",") if args.only else list(all_calls)
    if unknown := [name for name in names if name not in all_calls]:
        parser.error(f"no call is named {unknown[0]}: they are {', '.join(all_calls)}")
    print(HEAD, flush=True)
    about, rows = measure(args, [all_calls[name] for name in names])
    lines, passes = verdict(rows)
    print("\n".join(lines))
    if args.json:
        Path(args.json).write_text(to_json(about, rows))
    return 0 if passes else 1


if __name__ == "__main__":
    sys.exit(main())
