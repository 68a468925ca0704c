"""The tiles of a user's kernel: read from its block shapes, counted from a mask, or given."""

from __future__ import annotations

from dataclasses import replace

import pytest

from maxattn.devices import DEVICES
from maxattn.errors import MaxattnError
from maxattn.tools.cli.masks import read_mask
from maxattn.tools.compile.kernel_file import read_visited
from maxattn.tools.estimate.file_tiles import counted
from maxattn.tools.estimate.kernel import KernelDump
from maxattn.tools.model_shapes import Shape, read
from tests.golden_text import check_golden
from tests.tools.estimate.dumps import PRODUCT, small

V6E = DEVICES["TPU v6e"]
CAUSAL = replace(read("1,512,512,2,128"), mask=read_mask("causal"))
Operand = tuple[str, str]  # sides of a block, and of the operand
HEADS_FIRST: tuple[Operand, Operand] = (("1,128,128", "2,512,128"), ("1,128,128", "2,512,128"))


def kernel(operands: tuple[Operand, ...] = HEADS_FIRST, dynamic: bool = True) -> KernelDump:
    """Return the small dump with operands in HBM; the grid's length may be unknown."""
    bundles, slots = small()
    words = "".join(
        f" %s{i + 5} = inlined_call_operand.hbm [shape: bf16[{whole}]] /* input window allocation"
        f" for operator input {i}. The window shape is bf16[{block}], while the full shape is"
        f" bf16[{whole}]. */ ;;"
        for i, (block, whole) in enumerate(operands)
    )
    bundles = bundles.replace("0 : {", "0 : {" + words, 1)
    if dynamic:
        bundles = bundles.replace("loop exit test", "of a list")
    return KernelDump.read("theirs_fwd", bundles, slots, V6E, "x")


@pytest.mark.parametrize(
    "operands, block, heads",
    [
        (HEADS_FIRST, (128, 128), 2),
        ((("1,128,128", "2,512,128"), ("1,128,256", "2,128,512")), (128, 256), 2),
        ((("2,64,128", "2,512,128"), ("128,128", "512,128")), (64, 128), 1),
        ((("1,128,128", "1,512,512"), ("1,512,128", "1,512,512")), (128, 512), 4),
        ((("1,128,1,128", "1,512,2,128"), ("1,128,1,128", "1,512,2,128")), (128, 128), 2),
    ],
    ids=["heads_first", "keys_last", "stacked", "flat", "as_given"],
)
def test_tiles_of_a_causal_mask(operands, block, heads):
    found = counted(CAUSAL, ())(kernel(operands))
    assert found is not None and (found.block, found.heads) == (block, heads)
    marks = CAUSAL.mask.block_map(*block, 512, 512)
    assert (found.full, found.masked) == ((marks == 1).sum(), (marks == 2).sum())
    assert found.flops * found.visited * heads == pytest.approx(CAUSAL.operations)


def test_a_dynamic_grid_is_priced_by_its_visited_tiles():
    dump = kernel()
    made = dump.estimate(counted(CAUSAL, ())(dump))
    assert (made.steps, made.full, made.masked) == (2 * 10, 0.6, 0.4)
    assert made.hbm > 2 * 10 * 128 * 128 * 2  # K of each step
    given = dump.estimate(counted(CAUSAL, (6, 4))(dump))
    assert (given.cycles, given.hbm) == (made.cycles, made.hbm)


def test_tiles_may_be_given_where_blocks_do_not_show_them():
    dump = kernel((("8,8", "64,64"),))
    made = dump.estimate(counted(CAUSAL, (3, 2))(dump))
    assert (made.steps, made.full, made.block) == (2 * 5, 0.6, ())
    assert counted(read("1,512,512,2,128"), ())(dump) is None


def test_padded_keys_are_hidden_in_the_last_column():
    four_tiles = kernel((("1,256,128", "1,512,128"),) * 2, dynamic=False)
    found = counted(read("1,512,500,1,128"), ())(four_tiles)
    assert found is not None and (found.full, found.masked) == (2, 2)


def test_keys_of_a_single_column_are_fetched_once():
    dump = kernel((("1,128,128", "2,256,128"), ("1,512,128", "2,512,128")), dynamic=False)
    made = dump.estimate(counted(read("1,256,512,2,128"), ())(dump))
    q, k, out = 2 * 256 * 128 * 2, 2 * 512 * 128 * 2, 4 * 8 * 4
    assert made.steps == 4 and made.hbm == q + k + out


def test_the_body_with_fewer_products_is_the_masked_one():
    # The first body has one product of the second's two: it skips those above the diagonal.
    bundles, slots = small()
    ragged = bundles.replace("0x4 : > {}", f"0x4 : > {{ {PRODUCT} }}")
    step = KernelDump.read("small_fwd", ragged, slots, V6E, "x").step
    (full, _, busy), (masked, _, less) = step.costs()
    assert (full, masked) == (2, 2) and busy == 2 * less


def test_every_step_of_another_grid_is_priced_in_full():
    dump = kernel(dynamic=False)  # 4 steps, where the mask would leave 2 * 10
    assert counted(CAUSAL, ())(dump) is None
    assert counted(CAUSAL, ())(kernel((("8,8", "64,64"),), dynamic=False)) is None


def refusal(shape: Shape, visited: tuple[int, ...], dump: KernelDump) -> str:
    with pytest.raises(MaxattnError) as error:
        dump.estimate(counted(shape, visited)(dump))
    return str(error.value)


def test_what_cannot_be_counted():
    texts = [
        refusal(CAUSAL, (), kernel((("8,8", "64,64"), ("8,8", "64,64")))),
        refusal(CAUSAL, (12, 5), kernel()),
        refusal(read("1,512,512,2,128"), (), kernel()),
    ]
    for text in ("", "3", "3,-1", "0,0", "1,2,3", "a,b"):
        with pytest.raises(MaxattnError) as error:
            read_visited(text)
        texts.append(str(error.value))
    check_golden("cli/compile/kernel_file_tiles", "\n".join(texts))
