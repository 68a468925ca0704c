"""`maxattn tune --offline`: compiled candidates, the state after a stop, and the ranking."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import maxattn as ma
from maxattn import tuned
from maxattn.block_sizes import adjust, facts_of
from maxattn.block_sizes.estimated.choose import Estimate, padded_pairs, ranked
from maxattn.block_sizes.estimated.step_cost import Evaluates, Seconds, StepGrid
from maxattn.block_sizes.estimated.table import read_table
from maxattn.block_sizes.sizes import LANES
from maxattn.config.measurements import ESTIMATED, read_kept
from maxattn.devices import DEVICES
from maxattn.errors import InputError, Unsupported
from maxattn.masks import EMPTY, FULL, MIXED, LocalWindow
from maxattn.target import Target
from maxattn.tools.cli.tune import SizeTuning, ranked_sizes, ranking_lines
from maxattn.tools.estimate.kernel import KernelTiles, step_cost_of
from maxattn.tools.tune import schedules, store
from maxattn.tools.tune.candidates import tile_choices, without_likes
from maxattn.tools.tune.kernel_job import COLUMNS, ROWS, KernelJob
from maxattn.tools.tune.schedules import OfflineSearch, ScheduleLog, read_lines
from maxattn.tools.tune.ship import changed, table_of_log
from tests.block_sizes.small_costs import costs
from tests.golden_text import check_golden, check_refused
from tests.packages import needs_libtpu
from tests.tools.cli.command import run
from tests.tools.estimate.dumps import FORWARD, dump
from tests.tools.test_compile import stands_in

V6E = Target.named("TPU v6e", (("jax", "0.12.0.1"), ("tokamax", "0.0.17")))
CALL = ma.Call(1, 8190, 8190, 2, 2, 128, "bfloat16")
VERSIONS = {"libtpu": "0.0.99", "jax": "0.12.0.1"}
JOB = KernelJob("TPU v6e", "flash", "fwd", (512, 512, 512), 128, "bfloat16", True)


@dataclass
class Answers:
    """Answer as the compiler does: 4 bundles for 1,000 pairs, no tile above 2,048 queries."""

    stop: int = 0  # the number of the kernel at which Ctrl-C is pressed; 0 for never
    seconds: float = 10.0  # the limit of a compile
    least: float = 1.0  # what a compile takes
    asked: list[KernelJob] = field(default_factory=list)

    def answer(self, job: KernelJob) -> dict[str, Any]:
        self.asked.append(job)
        if len(self.asked) == self.stop:
            raise KeyboardInterrupt
        if self.seconds < self.least:
            return {"failed": "timeout", "after": self.seconds}
        if job.tile[0] > 2048:
            return {"failed": "JaxRuntimeError: VMEM"}
        bundles = 200 + 4 * job.tile[0] * job.tile[1] // 1000
        return {"cost": [bundles, 50, [0, 10, 0], [0, 10, 0], 1, 0, 0, 7]}


def search(path: Path, answers: Any, said: list[bool] | None = None) -> OfflineSearch:
    log = ScheduleLog(path, VERSIONS)
    notes = [] if said is None else said
    say = lambda job, answer, known: notes.append(known)  # noqa: E731
    return OfflineSearch(answers, log, "flash", CALL, V6E, 4, say)


# ---- what is compiled, and kept ------------------------------------------------------------------


def test_a_repeated_run_compiles_nothing(tmp_path):
    path, first, again = tmp_path / "schedules.jsonl", Answers(), Answers()
    known = search(path, first).run(training=True)
    said: list[bool] = []
    assert search(path, again, said).run(training=True) == known
    assert first.asked and not again.asked and all(said)
    assert len({job.tile for job in first.asked if job.kind == "dq"}) <= 1 + 4


def test_what_was_compiled_before_a_stop_is_not_compiled_again(tmp_path):
    path, stopped, whole = tmp_path / "a.jsonl", Answers(stop=6), Answers()
    with pytest.raises(KeyboardInterrupt):
        search(path, stopped).run(training=True)
    after = Answers()
    found = search(path, after).run(training=True)
    assert found == search(tmp_path / "b.jsonl", whole).run(training=True)
    assert stopped.asked[:5] + after.asked == whole.asked


def test_what_took_too_long_is_tried_again_with_more_time(tmp_path):
    path, short, same, longer = (tmp_path / "a", *(Answers(seconds=n) for n in (0.5, 0.5, 2.0)))
    for answers in (short, same, longer):
        found = search(path, answers).run(training=False)
    assert short.asked and not same.asked and longer.asked and found


def test_a_line_that_a_kill_cut_off_is_compiled_again(tmp_path):
    path = tmp_path / "schedules.jsonl"
    log = ScheduleLog(path, VERSIONS)
    log.add(JOB, Answers().answer(JOB))
    text = path.read_text()
    path.write_text(text + text[: len(text) // 2])  # the second kernel's line
    other = KernelJob(*(*vars(JOB).values(),)[:3], (1024, 512, 512), 128, "bfloat16", True)
    cut = ScheduleLog(path, VERSIONS)
    assert cut.find(JOB) and cut.find(other) is None
    cut.add(other, {"failed": "x"})
    assert [line["tile"] for line in read_lines(path)] == [[512, 512, 512], [1024, 512, 512]]


@pytest.mark.parametrize("text", ["[]", "{", '{"versions": 1}', "\x00", '{"cost": [1]}'])
def test_a_line_of_another_form_is_left_out(tmp_path, text):
    path = tmp_path / "schedules.jsonl"
    path.write_text(text + "\n")
    ScheduleLog(path, VERSIONS).add(JOB, {"failed": "x"})
    assert len([*read_lines(path)]) == 1


def test_schedules_of_other_versions_are_not_taken(tmp_path):
    path = tmp_path / "schedules.jsonl"
    ScheduleLog(path, VERSIONS).add(JOB, {"failed": "x"})
    assert ScheduleLog(path, VERSIONS).find(JOB)
    for name in VERSIONS:
        assert ScheduleLog(path, VERSIONS | {name: "9"}).find(JOB) is None


def test_kernels_of_changed_sources_are_compiled_again(tmp_path, monkeypatch):
    path = tmp_path / "schedules.jsonl"
    other = JOB.of(JOB.values() | {"kernel": "tpu_flash"})
    for job in (JOB, JOB, other):
        ScheduleLog(path, VERSIONS).add(job, {"failed": "x"})
    assert not [*changed(path, ScheduleLog(path, VERSIONS))]
    digest = schedules.source_digest
    monkeypatch.setattr(
        schedules, "source_digest", lambda name: "0" if name == "flash" else digest(name)
    )
    log = ScheduleLog(path, VERSIONS)
    assert [*changed(path, log)] == [JOB]
    log.add(JOB, {"failed": "x"})
    assert not [*changed(path, log)]


def test_choices_fit_and_the_first_pad_least():
    facts = facts_of(CALL, "flash", V6E, True)
    found = tile_choices("fwd", CALL, facts)
    assert all(size % LANES == 0 for tile in found for size in tile)
    assert padded_pairs(found[0], CALL) == min(padded_pairs(tile, CALL) for tile in found)
    distinct = [*without_likes(found, CALL)]
    assert 20 < len(distinct) < len(found)
    assert {*found} - {*distinct} >= {(1664, 2048, 1024), (768, 4096, 4096)}


def test_a_job_lies_in_hbm_and_has_whole_steps():
    for job in (JOB, KernelJob("TPU v4", "flash", "dkv", (1024, 512, 512), 64, "float32", False)):
        q_len, kv_len = job.lengths
        size = job.batch * job.heads * min(q_len, kv_len) * job.head_dim
        assert job.heads % 2 == 0 and size * (4 if job.dtype == "float32" else 2) >= 2**27
        assert {-(-q_len // job.tile[0]), -(-kv_len // job.tile[1])} == {ROWS, COLUMNS}
        assert KernelJob.of(json.loads(json.dumps(job.values()))) == job


@pytest.mark.parametrize("kind", ["fwd", "dq", "dkv", "fused"])
@pytest.mark.parametrize(
    "sides", [(512, 512), (1024, 2048), (2048, 1024), (1024, 4096), (4096, 512)]
)
def test_a_window_leaves_out_a_tile_and_no_step(kind, sides):
    """Tile lists do not reduce the number of steps, since the longest row has all tiles."""
    tile = sides if kind == "dq" else (*sides, 512)
    job = KernelJob("TPU v6e", "flash", kind, tile, 128, "bfloat16", Evaluates.INTERVAL)
    q_len, kv_len = job.lengths
    tiles = LocalWindow(*job.window).bind(q_len, kv_len).block_map(*sides, q_len, kv_len)
    tiles = tiles.T if job.by_key else tiles
    assert tiles.shape == (ROWS, COLUMNS) and (tiles[-1] != EMPTY).all()
    assert np.count_nonzero(tiles == EMPTY) == 1
    assert np.count_nonzero(tiles == FULL) and np.count_nonzero(tiles == MIXED)
    assert KernelJob.of(json.loads(json.dumps(job.values()))) == job


def test_the_online_softmax_is_kept_beside_the_other(tmp_path):
    path = tmp_path / "schedules.jsonl"
    job = KernelJob("TPU v6e", "tpu_flash", "fwd", (512, 512, 512), 128, "bfloat16", True)
    cost, online = ([n, 0, [0, 0, 0], [0, 0, 0], 1, 0, 0, 0] for n in (100, 150))
    for version in VERSIONS, VERSIONS:
        ScheduleLog(path, version).add(job, {"cost": cost, "online": online})
    ScheduleLog(path, VERSIONS).add(JOB, {"cost": cost, "online": [1]})  # damaged: left out
    (costs,) = read_table(table_of_log(path)).groups.values()
    found = {kind: tiles[job.tile].always for (kind, _), tiles in costs.items()}
    assert found == {"fwd": 100, "online": 150}


# ---- what a dump costs ---------------------------------------------------------------------------


@pytest.mark.parametrize("chip", ["v5p", "v6e"])
def test_a_step_of_a_dump_costs_what_its_estimate_says(chip):
    made = dump(chip, FORWARD)
    steps, columns, masked = 32, 4, 4
    tiles = KernelTiles((128, 128), 16 - masked, masked, (16, 16, 16), 2, 1.0, False)
    estimate = made.estimate(tiles)
    cost = step_cost_of(made, columns, steps)
    grid = StepGrid(2, 4, columns, masked / 16)
    assert estimate.steps == steps and cost.cores == estimate.cores
    assert cost.cycles(grid) == pytest.approx(estimate.cycles)
    assert cost.spills == estimate.spills
    assert cost.seconds(grid, DEVICES[f"TPU {chip}"]) == pytest.approx(estimate.seconds)


def test_a_grid_of_other_steps_is_refused():
    check_refused("cli/tune/offline_steps", Unsupported, step_cost_of, dump("v5p", FORWARD), 4, 33)


# ---- measured and estimated ----------------------------------------------------------------------


def entry(ms: float, side: int, source: str = "") -> dict[str, Any]:
    made = {"device_kind": "TPU v6e", "versions": "jax 0.12.0.1", "kernel": "flash", "error": ""}
    sizes = {"block_q": side, "block_kv": side, "block_kv_compute": side}
    times = {"forward_ms": None, "training_ms": ms}
    extra = {"source": source} if source else {}
    return made | {"call": tuned.key_of(CALL), "sizes": sizes} | times | extra


def test_measured_entries_win_over_estimated_ones():
    packages = (("jax", "0.12.0.1"),)
    both = [entry(1.0, 512, ESTIMATED), entry(2.0, 1024), entry(3.0, 2048)]
    (best,) = tuned.winners(both, "TPU v6e", packages, "x")
    assert (dict(best.sizes)["block_q"], best.estimated) == (1024, False)
    (best,) = tuned.winners(both[:1], "TPU v6e", packages, "x")
    assert (dict(best.sizes)["block_q"], best.estimated) == (512, True)
    failed = entry(0.0, 1024) | {"training_ms": None, "error": "VMEM"}
    (best,) = tuned.winners([both[0], failed], "TPU v6e", packages, "x")
    assert best.estimated


def test_an_estimate_and_a_measurement_of_the_same_sizes_are_both_kept(tmp_path):
    path = tmp_path / "tuned.json"
    measured, estimated = entry(2.0, 512), entry(1.0, 512, ESTIMATED)
    for one in (measured, estimated, entry(1.5, 512, ESTIMATED)):
        store.add(path, one)
    kept = read_kept(path).measurements
    assert [(m["training_ms"], m.get("source")) for m in kept] == [(2.0, None), (1.5, ESTIMATED)]
    found = store.find(path, entry(0.0, 512))  # what a timing asks: estimates are none
    assert found is not None and found["training_ms"] == 2.0


def test_a_plan_says_that_kept_sizes_are_estimated():
    (best,) = tuned.winners([entry(1.0, 1024, ESTIMATED)], "TPU v6e", V6E.packages, "tuned.json")
    target = Target("tpu", "TPU v6e", V6E.packages, tuned=(best,))
    plan = ma.plan(CALL, ma.AttentionConfig(attention="flash"), None, target)
    assert plan.notes[-2].startswith("sizes estimated by libtpu's schedule, not run, block_q 1024")
    assert plan.notes[-1].startswith("3 kernels measured on v6e took 1.11 to 1.12 times")


# ---- the command ---------------------------------------------------------------------------------


def tuning(call: ma.Call) -> SizeTuning:
    return SizeTuning("x", ma.AttentionConfig(), "flash", call, V6E, True)


def test_the_ranking():
    known = {**costs(100, 350, waits=8, fused=True), **costs(100, 350, waits=8)}
    found = ranked_sizes(tuning(CALL), known)
    assert found[0].sizes.use_fused_bwd_kernel and found[0].sizes.block_q == 1024
    sizes, _ = adjust(ma.config.FlashBlockSizes(), CALL, "flash", V6E, True)
    unset = Estimate(sizes, Seconds(2e-4, 3e-4))
    text = "\n".join(ranking_lines(found, unset, "estimated by libtpu 0.0.99's schedule, not run"))
    check_golden("cli/tune/offline_ranking", text)


def test_sizes_that_need_more_memory_than_there_is_are_left_out():
    large = ma.Call(1, 131072, 131072, 40, 40, 128, "bfloat16")
    known = {**costs(100, 350, fused=True), **costs(100, 350)}
    found = ranked_sizes(tuning(large), known)
    assert found and not any(one.sizes.use_fused_bwd_kernel for one in found)
    assert ranked(known, large, "flash", V6E, True, True)


WORDS = ["attention=flash", "--shape", "1,4096,4096,8,128", "--offline"]
# ---- the compiler's process ----------------------------------------------------------------------


@pytest.mark.slow
@needs_libtpu
def test_a_real_ranking(capsys, cache):
    words = [*WORDS, "--target", "v6e", "--forward", "--limit", "1"]
    first, again = (run(capsys, "tune", *words) for _ in range(2))
    assert first.status == again.status == 0 and first.out == again.out
    assert "cycles a step" in first.err and "cycles a step" not in again.err
    kept = read_kept(cache).measurements
    assert kept and all(m["source"] == ESTIMATED and m["forward_ms"] > 0 for m in kept)


def test_schedules_that_are_not_understood_are_said(capsys, cache, tmp_path, monkeypatch):
    why = "Unsupported: estimate: libtpu 0.0.60's dump; rule a loop begins where no branch leads"
    failed = json.dumps({"failed": why.replace("'", "")})
    versions = f"read request; echo '{json.dumps(VERSIONS)}' >&9"
    stands_in(tmp_path, monkeypatch, versions, f"while read job; do echo '{failed}' >&9; done")
    text = run(capsys, "tune", *WORDS, "--target", "v6e").text
    check_golden("cli/tune/offline_not_understood", text.replace(str(cache.parent), "cache"))


# ---- the table that ships ------------------------------------------------------------------------


def test_a_table_is_of_one_libtpu(tmp_path):
    path = tmp_path / "log"
    for version in ("1", "2"):
        ScheduleLog(path, VERSIONS | {"libtpu": version}).add(JOB, Answers().answer(JOB))
    with pytest.raises(InputError, match="it must have lines of one libtpu"):
        table_of_log(path)
