"""A dump of another form is refused by name: no number is made of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from maxattn.devices import DEVICES, Device, device_of
from maxattn.errors import Unsupported
from maxattn.tools.estimate.kernel import KernelDump, core_of
from maxattn.tools.estimate.program import Dumps
from tests.golden_text import check_golden
from tests.tools.cli.command import run
from tests.tools.estimate.dumps import FOLDER, FORWARD, PRODUCT, dump, small, texts, three_bodies

BODY = "0x8 : > { " + PRODUCT
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


def refused(bundles: str, slots: str, name: str = "small_fwd", kind: str = "TPU v6e") -> str:
    with pytest.raises(Unsupported) as error:
        KernelDump.read(name, bundles, slots, DEVICES[kind], "0.0.99").estimate(None)
    return str(error.value)


@pytest.mark.parametrize("kind", OF_BUNDLES)
def test_bundles_of_another_form(kind):
    bundles, slots = texts("v5p", FORWARD)
    changed = OF_BUNDLES[kind](bundles)
    assert changed != bundles
    check_golden(f"cli/estimate/{kind}", refused(changed, slots, FORWARD, "TPU v5p"))


@pytest.mark.parametrize("kind", OF_SMALL)
def test_loops_of_another_form(kind):
    bundles, slots = small()
    changed = OF_SMALL[kind](bundles)
    assert changed != bundles
    slots += "0 0 0 0\n" * (kind == "two_loops")
    check_golden(f"cli/estimate/{kind}", refused(changed, slots))


def test_three_bodies():
    check_golden("cli/estimate/three_bodies", refused(*three_bodies()))


SLOTS: dict[str, Callable[[str], str]] = {
    "another_heading": lambda text: text.replace("CAPACTIY", "CAPACITY"),
    "another_row": lambda text: text.replace("0 1 0 0\n", "0 1 0\n", 1),
    "a_row_too_few": lambda text: text.replace("0 1 0 0\n", "", 1),
}


@pytest.mark.parametrize("kind", SLOTS)
def test_a_table_of_another_form(kind):
    bundles, slots = small()
    changed = SLOTS[kind](slots)
    assert changed != slots
    check_golden(f"cli/estimate/{kind}", refused(bundles, changed))


def test_a_kernel_without_a_file(tmp_path):
    with pytest.raises(Unsupported) as error:
        Dumps.of(tmp_path, "0.0.99").texts(("my_kernel.1", "my_kernel.2"))
    check_golden("cli/estimate/no_file", str(error.value))


def test_a_twin_has_the_file():
    dumps = Dumps.of(FOLDER / "v5p", "x")
    assert dumps.texts(("another.1", FORWARD)) == texts("v5p", FORWARD)


def test_a_dynamic_grid_needs_the_plans_tiles():
    with pytest.raises(Unsupported, match="only the device knows how many steps"):
        dump("v6e", FORWARD).estimate(None)


def test_a_device_without_public_figures():
    unknown = device_of("TPU v9", "tpu")
    assert unknown == Device("TPU v9", unknown.family)
    with pytest.raises(Unsupported) as error:
        core_of(unknown)
    check_golden("cli/estimate/no_figures", str(error.value))


def test_what_is_no_tpu(capsys):
    words = ["attention=auto", "--target", "H200", "--shape", "1,512,512,2,128", "--estimate"]
    check_golden("cli/estimate/no_tpu", run(capsys, "compile", *words).text)
