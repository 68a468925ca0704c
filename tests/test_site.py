"""The documentation site: generated texts are complete and correct, and the site builds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import maxattn as ma
from docs.building import commands, links, settings, support, support_page
from maxattn.config.settings import FlashBlockSizes
from maxattn.kernels import KERNELS
from maxattn.tools.cli import COMMANDS
from tests.pages import ROOT, pages, text_of

API = "\n".join(text_of(page) for page in pages() if page.startswith("docs/api/"))
NOTEBOOKS = [page for page in pages() if page.startswith("docs/notebooks/")]


# ---- the API -------------------------------------------------------------------------------------


def documented(text: str) -> set[str]:
    """Return the names that the API's pages describe, such as "maxattn.masks.Causal"."""
    found, module = set(), ""
    for kind, name in re.findall(r"^\.\. ([\w:]+):: ([\w.]+)", text, re.MULTILINE):
        if kind == "currentmodule":
            module = name
        else:
            found.add(name if name.startswith("maxattn.") else f"{module}.{name}")
    return found


def public() -> set[str]:
    """Return all public names: the exports of modules, each object under its shortest name."""
    from maxattn import errors, masks, modules, rope, steps, streaming, weights

    named: dict[int, str] = {}
    for module in (ma, masks, modules, rope, steps, streaming, weights):
        for name in module.__all__:
            value = getattr(module, name)
            if not isinstance(value, ModuleType):
                key = id(value) if callable(value) else hash((module.__name__, name))
                named.setdefault(key, f"{module.__name__}.{name}")
    raised = [name for name in vars(errors) if name.endswith("Error") or name == "Unsupported"]
    sharding = ("place", "program_mesh", "inside_auto_axes")
    places = {f"maxattn.sharding.{name}" for name in sharding}
    return {*named.values(), *places, *(f"maxattn.errors.{name}" for name in raised)}


def test_everything_public_is_documented_once():
    found = documented(API)
    assert not public() - found, "add these to a page of docs/api/"
    beside = {"settings.FlashBlockSizes", "maxdiffusion.Imported", "errors.ConfigErrors"}
    assert found - public() == {f"maxattn.config.{name}" for name in beside}
    names = re.findall(r"^\.\. (?:auto|py:)\w+:: ([\w.]+)", API, re.MULTILINE)
    assert len(names) == len(set(names))


def test_every_key_of_the_config_is_listed():
    entries = [entry.split("\n: ") for entry in settings.text().split("\n\n")]
    found = {entry[0].strip("`").split(": ")[0]: entry for entry in entries}
    sizes = {f"flash_block_sizes.{key}" for key in FlashBlockSizes.model_fields}
    assert found.keys() == {*ma.AttentionConfig.model_fields} - {"flash_block_sizes"} | sizes
    assert all(len(entry) == 3 and entry[1] for entry in entries)
    assert found["fallback"][::2] == [
        "`fallback: null`", "Values: `error`, `warn`, `allow`, `null`."
    ]  # fmt: skip
    assert found["mesh_axes"][0] == "`mesh_axes: [data, fsdp, context, tensor]`"
    assert found["ici_fsdp_batch_parallelism"][2] == "Values: `-1`, 1 or more, `null`."
    assert found["flash_block_sizes.block_q"][2] == "Values: 1 or more, `null`."


def test_every_command_is_listed_with_its_options():
    text = commands.text()
    assert re.findall(r"^## (\w+)", text, re.MULTILINE) == list(COMMANDS)
    assert "usage: maxattn explain" in text and "--why" in text


# ---- the support matrix --------------------------------------------------------------------------


def test_what_is_refused_in_a_cell_is_refused_by_the_plan_that_names_the_kernel():
    target = support.target_of("NVIDIA H200")
    for asked in support.rows():
        for kernel, reason in support.cells(asked, target):
            if kernel != "memory_efficient":  # a setting asks for it, and no name
                config = ma.AttentionConfig(attention=kernel, deterministic=asked.deterministic)
                assert raised(asked.call, config, target) == (reason.rule if reason else None)


def raised(call: ma.Call, config: ma.AttentionConfig, target: ma.Target) -> str | None:
    """Return the rule by which a plan is refused, or None."""
    try:
        ma.plan(call, config, target=target)
    except NotImplementedError as error:
        return getattr(error, "rule", None)
    return None


def test_each_row_changes_one_thing():
    calls = [asked.call for asked in support.rows() if not asked.deterministic]
    plain = [call for call in calls if call == support.PLAIN]
    assert len(plain) == 3  # no mask, bfloat16, head dim 128
    assert len({*calls}) == len(calls) - len(plain) + 1
    assert {call.scale for call in calls} == {h**-0.5 for h in support.HEAD_DIMS}


def test_the_matrix_has_a_tab_for_each_machine_and_a_reason_for_each_no():
    text = support_page.text()
    assert re.findall(r"^:::\{tab-item\} (.+)$", text, re.MULTILINE) == list(support.HARDWARE)
    assert text.count("<td") == len(support.HARDWARE) * len(support.rows()) * len(KERNELS)
    wanted = set(re.findall(r'<td class="no" title="[^"]+"><a href="#([\w-]+)">', text))
    ids = re.findall(r'<li id="([\w-]+)">', text)
    assert wanted == set(ids) and len(ids) == len(set(ids))


def test_a_gpu_that_was_not_measured_is_marked():
    machines = {name: support.target_of(kind) for name, kind in support.HARDWARE.items()}
    said = {name: support.measured(target) for name, target in machines.items()}
    gpus = {name for name, target in machines.items() if target.platform == "gpu"}
    unmeasured = {name for name, text in said.items() if text.startswith("Not measured")}
    measured = gpus - unmeasured
    assert measured == {"H100", "H200"} and "measured on this GPU" in said["H200"]
    assert not any(said[name] for name in machines.keys() - gpus)


# ---- pages ---------------------------------------------------------------------------------------


def test_links_of_a_page_from_outside_lead_where_they_led():
    text = links.text_of("README.md")
    for target in re.findall(r"\]\(([^)\s:#]+)", text):
        assert (ROOT / "docs" / target).exists(), target
    assert "](guide/masks.md)" in text and "](changes.md)" in text


def test_code_is_no_link():
    text = "[a](a.md)\n```python\nlist[0](x)\n```\n[b](b.md)"
    moved = links.relinked(text, ROOT / "README.md", ROOT / "docs" / "index.md")
    assert moved == "[a](../a.md)\n```python\nlist[0](x)\n```\n[b](../b.md)"


def test_a_link_to_raw_data_is_a_link_to_a_file():
    page = ROOT / "docs" / "results.md"
    text = "[a](measured/a.json) [b](guide/masks.md#limits) [c](https://x)"
    moved = links.relinked(text, page, page)
    assert moved == "[a](path:measured/a.json) [b](guide/masks.md#limits) [c](https://x)"


def test_every_page_is_in_the_site_s_tree():
    trees = re.findall(r"(?ms)^:::\{toctree\}.*?^:::$", text_of("docs/index.md"))
    listed = {f"docs/{line}.md" for tree in trees for line in tree.splitlines()}
    shown = {p for p in pages() if p.startswith("docs/") and "/measured/" not in p}
    assert {page for page in listed if ":" not in page} - {"docs/.md"} == shown - {"docs/index.md"}


@pytest.mark.parametrize("page", NOTEBOOKS)
def test_a_notebook_sets_its_devices_before_jax_and_says_its_kernel(page):
    text = text_of(page)
    assert text.startswith("---\njupytext:\n") and "name: python3\n---\n" in text
    assert text.index("xla_force_host_platform_device_count=8") < text.index("import jax")


# ---- the build -----------------------------------------------------------------------------------


def python_of_docs() -> str:
    """Return a Python with the extra `docs`, or skip."""
    named = os.environ.get("MAXATTN_DOCS_PYTHON")
    made = ROOT / ".venv-docs" / "bin" / "python"
    for python in (named, str(made) if made.exists() else None, sys.executable):
        probe = [python, "-c", "import myst_nb, sphinx_book_theme, sphinx_design"]
        if python and subprocess.run(probe, capture_output=True, check=False).returncode == 0:
            return python
    pytest.skip("no Python with maxattn[docs]: run `make docs` first, or set MAXATTN_DOCS_PYTHON")


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    words = ["-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html", "docs"]
    command = [python_of_docs(), *words, "-d", str(tmp_path / "trees"), str(tmp_path / "html")]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr[-4000:]
    made = {str(p.relative_to(tmp_path / "html")) for p in (tmp_path / "html").rglob("*.html")}
    shown = [p for p in pages() if p.startswith("docs/") and "/measured/" not in p]
    assert {str(Path(p).relative_to("docs").with_suffix(".html")) for p in shown} <= made
    shutil.rmtree(tmp_path / "html")
