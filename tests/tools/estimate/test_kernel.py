"""The cost of a schedule: dumps of real kernels, and one small enough to add up by hand.

A dump of another form is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from maxattn.block_sizes.estimated.step_cost import StepGrid
from maxattn.block_sizes.sizes import chip_of
from maxattn.config import AttentionConfig
from maxattn.decide import plan
from maxattn.devices import DEVICES, Device, device_of
from maxattn.errors import Unsupported
from maxattn.target import Target
from maxattn.tools.cli.masks import read_mask
from maxattn.tools.compile.child import target_of
from maxattn.tools.estimate.bundles import Bundle, products
from maxattn.tools.estimate.kernel import (
    KernelDump,
    KernelTiles,
    core_of,
    online_cost_of,
    step_cost_of,
    tiles_of,
)
from maxattn.tools.estimate.program import Dumps
from maxattn.tools.estimate.step import BodyShares
from maxattn.tools.model_shapes import read
from tests.golden_text import check_golden, check_refused
from tests.tools.estimate.dumps import (
    BACKWARD,
    FOLDER,
    FORWARD,
    PRODUCT,
    dump,
    small,
    texts,
    three_bodies,
    two_forms,
)

V6E = DEVICES["TPU v6e"]  # a product takes 8 cycles of one of two units
SIZES = {"block_q": 128, "block_kv": 128, "block_kv_compute": 128}
ALL = KernelTiles((128, 128), 16, 0, (16, 16, 16), 2, 4.0 * 128 * 128 * 128, False)


def cycles(products: int = 2, full: float = 1.0, masked: float = 0.0) -> tuple[float, float]:
    """Return the cost of a step of the small kernel in rows of four."""
    cost = KernelDump.read("small_fwd", *small(products), V6E, "x").cost(4, 4)
    return cost.cycles(StepGrid(1, 1, 4, masked, 1 - full - masked))


@pytest.mark.parametrize("name", [n for n, d in DEVICES.items() if d.platform == "tpu"])
def test_a_core_reaches_the_published_peak(name):
    device = DEVICES[name]
    assert device.core is not None and device.core.peak == pytest.approx(device.peak, rel=5e-3)


def test_a_step_is_what_it_runs():
    # Seven bundles always, two once in four steps, two of the body. Of two products the second
    # waits 8 cycles for the unit.
    assert cycles() == (9.5, 17.5)
    # A body that half of the steps skip.
    assert cycles(full=0.25, masked=0.25) == (8.5, 12.5)


def test_a_step_is_not_faster_than_its_matrix_units():
    fast, slow = cycles(products=4)
    assert fast == 4 * 8 / 2  # over both units
    assert slow == 9.5 + 3 * 8  # in order, on one


def test_slots_of_the_matrix_units_are_one_unit():
    """libtpu 0.0.52 calls them MATMUL and MATPUSH."""
    bundles, slots = small()
    renamed = slots.replace("MXU,", "MATMUL, MATPUSH,").splitlines()
    lines = [
        x if i in (0, 1, 3) else " ".join((x.split()[0], *x.split())) for i, x in enumerate(renamed)
    ]
    read = KernelDump.read("small_fwd", bundles, "\n".join(lines), V6E, "x")
    old = KernelDump.read("small_fwd", *small(), V6E, "x")
    shares = BodyShares(1.0, 0.0, 4.0)
    assert read.step.use(shares) == old.step.use(shares)


def test_a_grid_of_one_step_has_no_loop():
    bundles, slots = small()
    for word in ("LB:", "sbr.rel (!%p3) target = $region10", "loop exit test"):
        bundles = bundles.replace(word, ":" if word == "LB:" else "")
    priced = KernelDump.read("small_fwd", bundles, slots, V6E, "x").estimate(None)
    # Ten bundles outside of the edge and the body, which run once too.
    assert (priced.steps, priced.cycles) == (1, (10 + 2 + 2, 10 + 2 + 2 + 8))


def test_a_kernel_of_which_nothing_is_known_runs_the_body_with_most_products():
    # The edge gets one product: it is the body of a ragged length's rest, as short as the other.
    bundles, slots = small()
    ragged = bundles.replace("0x4 : > {}", f"0x4 : > {{ {PRODUCT} }}")
    priced = KernelDump.read("small_fwd", ragged, slots, V6E, "x").estimate(None)
    # Seven bundles always and two of the body, whose second product waits for 8 cycles.
    assert priced.cycles == (9, 17)


def test_slots_of_the_body():
    step, shares = KernelDump.read("small_fwd", *small(), V6E, "x").step, BodyShares(1.0, 0.0, 4)
    use, used = step.use(shares), step.used(shares)
    assert use == {"MXU": 4.0, "VALU": 0.5, "VLOAD:FILL": 0.5, "VSTORE:SPILL": 0.25}
    assert (used["VSTORE:SPILL"], used["VLOAD:FILL"]) == (1, 3)


def test_a_kernel_on_both_cores_and_one_on_a_single_core():
    forward, backward = (dump("v5p", name) for name in (FORWARD, BACKWARD))
    assert (forward.cores, backward.cores) == (2, 1)
    assert (forward.phase, backward.phase) == ("fwd", "dkv")
    of_forward, of_backward = forward.estimate(ALL), backward.estimate(ALL)
    # 2 heads of 4 x 4 tiles: half of the steps on each core, or all on one.
    assert (of_forward.steps, of_backward.steps) == (32, 32)
    for one, steps in ((of_forward, 16), (of_backward, 32)):
        assert one.seconds == pytest.approx([steps * n / 1.75e9 for n in one.cycles])
        assert one.flops == 32 * ALL.flops
        assert one.cycles[0] < one.cycles[1]


@pytest.mark.parametrize("name, cores", [(FORWARD, 2), (BACKWARD, 1)])
def test_libtpu_0_0_42_spells_the_core_in_another_way(name, cores):
    bundles = texts("v5p", name)[0]
    changed = bundles.replace("megacore core id :: core id", "core id")
    assert changed != bundles and dump("v5p", name, changed).cores == cores


def test_products_of_a_real_dump_are_all_counted():
    # 128 x 128 tiles of head dim 128: q and k in bfloat16, 16 rows a product; P in float32, 8.
    rows = dump("v5p", FORWARD).bundles.rows
    found = [dtype for row in rows for dtype, _ in products(row, "")]
    assert (found.count("bf16"), found.count("f32")) == (128 // 16, 128 // 8)
    found = [dtype for row in dump("v5p", BACKWARD).bundles.rows for dtype, _ in products(row, "")]
    assert found == ["bf16"] * (4 * 128 // 16)


SPELLINGS = {
    "v5p": "%1 = vmatmul.bf16.vlgmr.msra.gmra.mxu0 %v2",
    "v4, head dim 64": "%1 = vmatmul.msk.bf16.gmra.mxu0 %vm3, %v2",
    "v6e": "%1 = vmatmul.mubr.bf16.gmra.mxu0 %v2",
    "v6e, head dim 64": "%1 = vmatmul.mubr.msk.bf16.vlgmr.msra.gmra.mxu0 %vm3, %v2",
    "v7x": "%1 = vmatmul.mubr.bf16.gmra.mrb[7].mxu0 %v2",
}


@pytest.mark.parametrize("chip", SPELLINGS)
def test_a_product_is_read_as_each_chip_spells_it(chip):
    assert products(Bundle(SPELLINGS[chip], "", False), "") == [("bf16", "mxu0")]


def test_bytes_of_hbm():
    forward = dump("v5p", FORWARD).estimate(ALL)
    # The outputs alone lie in HBM: bfloat16 [2, 512, 128], and the LSE float32 [2, 512, 128].
    assert forward.hbm == 2 * 512 * 128 * (2 + 4)
    slow = forward.hbm / forward.hbm_rate
    assert forward.seconds[0] >= slow


def test_a_kernel_that_waits_for_hbm_takes_its_time():
    device = V6E
    assert device.machine is not None
    slow = replace(device, machine=device.machine._replace(hbm=1.0))
    priced = KernelDump.read("small_fwd", *small(), slow, "x").estimate(
        KernelTiles((8, 8), 4, 0, (4, 4, 4), 1, 1.0, False)
    )
    assert priced.hbm == 4 * 8 * 4 and priced.seconds == (priced.hbm, priced.hbm)


def causal_plan(kernel: str = "tokamax_flash", strategy: str = "none", ways: int = 1):
    ring = {"context_parallel": strategy, "ici_context_parallelism": ways} if ways > 1 else {}
    config = AttentionConfig(attention=kernel, flash_block_sizes=SIZES, **ring)
    shape = replace(read("1,512,512,2,128"), mask=read_mask("causal"))
    target = Target.named("TPU v6e", packages=(("tokamax", "0.0.17"),))
    return plan(shape.call(), config, {"context": ways} if ways > 1 else None, target)


def test_the_tiles_of_a_causal_mask():
    tiles = tiles_of(causal_plan(), True)
    assert tiles.keys() == {"fwd", "dkv"}  # tokamax's backward is one kernel
    # Of 4 x 4 tiles, four on the diagonal and six below it.
    one = tiles["fwd"]
    assert (one.full, one.masked, one.heads, one.grids) == (6, 4, 2, (16, 16, 16))
    pairs = 512 * 513 / 2
    assert one.flops * one.visited == pytest.approx(2 * 2 * 128 * pairs)
    assert tiles["dkv"].flops == pytest.approx(one.flops * 5 / 2)
    apart = tiles_of(causal_plan("flash"), True)
    assert [apart[p].flops / one.flops for p in ("fwd", "dkv", "dq")] == pytest.approx([1, 2, 1.5])


def test_two_bodies_are_priced_by_their_tiles():
    kernel = dump("v6e", FORWARD)
    short, long = (s.end - s.start for s in kernel.step.bodies)
    assert short < long
    tiles = tiles_of(causal_plan(), False)["fwd"]
    mixed = kernel.estimate(tiles)
    assert mixed.steps == 2 * 10 and (mixed.full, mixed.masked) == (0.6, 0.4)
    full = kernel.estimate(tiles._replace(full=10, masked=0))
    masked = kernel.estimate(tiles._replace(full=0, masked=10))
    # Always the same, but for the body.
    assert masked.cycles[0] - full.cycles[0] == pytest.approx(long - short)
    assert mixed.cycles[0] == pytest.approx(full.cycles[0] + 0.4 * (long - short))


def test_the_online_softmax_of_tpu_flash_is_not_priced():
    kernel = KernelDump.read("vmap_tpu_flash_fwd_.1", *two_forms(), V6E, "x")
    lengths = [[body.end - body.start for body in kernel.step.bodies_of(form)] for form in (0, 1)]
    # Each form's in the order of their lengths; the shortest of all is of the second form.
    assert lengths == [[2, 2], [1, 3]]
    assert kernel.step.bodies == kernel.step.bodies_of(0)
    # They are no edges of a row of tiles either.
    cost = kernel.cost(4, 4)
    assert cost.cycles(StepGrid(1, 1, 4, 0, idle=1))[0] == len(kernel.step.always)


def test_the_online_softmax_has_costs_of_its_own():
    kernel = KernelDump.read("vmap_tpu_flash_fwd_.1", *two_forms(), V6E, "x")
    usual = step_cost_of(kernel, 2, 4)
    online = online_cost_of(kernel, usual)
    assert online is not None and (online.always, online.edges) == (usual.always, usual.edges)
    assert (usual.full[0], usual.masked[0]) == (2, 2)
    assert (online.full[0], online.masked[0]) == (1, 3)
    other = dump("v6e", FORWARD)
    assert online_cost_of(other, step_cost_of(other, 4, 32)) is None


def test_forms_of_unlike_numbers_of_bodies_are_refused():
    kernel = KernelDump.read("vmap_tpu_flash_fwd_.1", *three_bodies(), V6E, "x")
    with pytest.raises(Unsupported, match="among 3 bodies, and 2 or 4 are supported"):
        kernel.estimate(ALL)


def test_a_ring_of_masked_tiles_is_a_bound():
    assert not tiles_of(causal_plan("flash", "ulysses", 2), True)["dkv"].is_bound
    assert tiles_of(causal_plan("flash", "all_gather", 4), True)["dkv"].is_bound
    tiles = tiles_of(causal_plan("flash", "ring", 4), True)["dkv"]
    assert tiles.is_bound
    priced = dump("v5p", BACKWARD).estimate(tiles)
    assert (priced.full, priced.masked, priced.flops) == (0.0, 1.0, 0.0) and priced.is_bound
    # A grid whose length the device knows has all tiles at most.
    priced = dump("v6e", FORWARD).estimate(tiles)
    assert priced.steps == tiles.heads * tiles.grids[0] and priced.is_bound


def test_a_kernel_of_half_of_the_plans_tiles():
    # A ring cuts its local block in halves: the same share is full, where no tile is skipped.
    twice = ALL._replace(full=24, masked=8, grids=(32, 32, 32))
    priced = dump("v5p", BACKWARD).estimate(twice)
    assert (priced.full, priced.masked) == (0.75, 0.25) and priced.flops == 32 * ALL.flops
    skips = twice._replace(full=20)
    assert dump("v5p", BACKWARD).estimate(skips).is_bound


def test_a_limit_of_vmem_in_the_environment_holds_for_the_tiles(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=61440")
    chip = chip_of(target_of("TPU v6 lite"))
    assert chip is not None and (chip.name, chip.limit) == ("TPU v6e", 61440 * 1024)
    monkeypatch.delenv("LIBTPU_INIT_ARGS")
    chip = chip_of(target_of("TPU v6 lite"))
    assert chip is not None and chip.limit == DEVICES["TPU v6e"].vmem


# ---- refusals ------------------------------------------------------------------------------------

# Changes of a real dump's bundles, or of the small one's: each is something that an estimate needs.
OF_BUNDLES: dict[str, Callable[[str], str]] = {
    "no_bundles": lambda text: "some other text",
    "a_bundle_is_missing": lambda text: text.replace("  0x20   :", "  0x21   :"),
    "no_way_back": lambda text: text.replace("target = $region102", "target = $region5"),
    "out_of_the_loop": lambda text: text.replace("$region40", "$region99999"),
    "no_blocks": lambda text: text.replace("window allocation", "allocation"),
    "another_dtype": lambda text: text.replace("vmatmul.bf16", "vmatmul.f8e4m3"),
    "another_branch": lambda text: text.replace("sbr.rel (%p258", "sbr.abs (%p258"),
    "a_long_wait": lambda text: text.replace("0x20   : > {", "0x20   : > { %1 = vdelay 100 "),
    "a_bound_that_is_no_number": lambda text: text.replace("18 /* loop", "%s1 /* loop"),
    "no_core": lambda text: text.replace("core id", "id"),
    "another_grid": lambda text: text.replace("(1, 4, 4)", "(1, 4, 5)"),
}
OF_SMALL: dict[str, Callable[[str], str]] = {
    "another_counter": lambda text: text.replace("sadd.s32 1,", "sadd.s32 2,"),
    "two_exits": lambda text: text.replace(
        "0x9 : > {}", "0x9 : > { %p4 = scmp.ge.s32.totalorder %s9, 7 /* loop exit test */ }"
    ),
    "a_dynamic_grid": lambda text: text.replace("loop exit test", "of a list"),
    "two_loops": lambda text: text.replace(
        "0xd : {}",
        "0xd LB: > { sbr.rel (!%p8) target = $region50 } /* Start region 50 */\n0xe : {}",
    ),
}
OF_SLOTS: dict[str, Callable[[str], str]] = {
    "another_heading": lambda text: text.replace("CAPACTIY", "CAPACITY"),
    "another_row": lambda text: text.replace("0 1 0 0\n", "0 1 0\n", 1),
    "a_row_too_few": lambda text: text.replace("0 1 0 0\n", "", 1),
}


def refused(bundles: str, slots: str, name: str = "small_fwd", kind: str = "TPU v6e") -> str:
    with pytest.raises(Unsupported) as error:
        KernelDump.read(name, bundles, slots, DEVICES[kind], "0.0.99").estimate(None)
    return str(error.value)


@pytest.mark.parametrize("kind", [*OF_BUNDLES, *OF_SMALL, *OF_SLOTS])
def test_dumps_of_another_form(kind):
    bundles, slots = before = texts("v5p", FORWARD) if kind in OF_BUNDLES else small()
    bundles = (OF_BUNDLES | OF_SMALL).get(kind, str)(bundles)
    slots = OF_SLOTS.get(kind, str)(slots)
    assert (bundles, slots) != before
    slots += "0 0 0 0\n" * (kind == "two_loops")
    of = (FORWARD, "TPU v5p") if kind in OF_BUNDLES else ()
    check_golden(f"cli/estimate/{kind}", refused(bundles, slots, *of))


def test_three_bodies():
    check_golden("cli/estimate/three_bodies", refused(*three_bodies()))


def test_a_kernel_without_a_file(tmp_path):
    dumps, names = Dumps.of(tmp_path, "0.0.99"), ("my_kernel.1", "my_kernel.2")
    check_refused("cli/estimate/no_file", Unsupported, lambda: dumps.texts(names))


def test_a_twin_has_the_file():
    dumps = Dumps.of(FOLDER / "v5p", "x")
    assert dumps.texts(("another.1", FORWARD)) == texts("v5p", FORWARD)


def test_a_dynamic_grid_needs_the_plans_tiles():
    with pytest.raises(Unsupported, match="grid steps is known only on the device"):
        dump("v6e", FORWARD).estimate(None)


def test_a_device_without_public_figures():
    unknown = device_of("TPU v9", "tpu")
    assert unknown == Device("TPU v9", unknown.family)
    check_refused("cli/estimate/no_figures", Unsupported, lambda: core_of(unknown))
