"""How the site is built: `make docs`, which runs Sphinx with warnings as errors.

The pages are those of this folder. `building/` holds what is made of the code at build time.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

# The notebooks run on eight devices that a CPU plays; what was tuned here changes no page.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    (
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",  # most of their time is compiling small programs
        "--xla_cpu_parallel_codegen_split_count=1",
    )
)
os.environ["MAXATTN_CACHE"] = os.devnull
os.environ["PYTHONPATH"] = str(ROOT)

import maxattn  # noqa: E402

project, author, copyright = "maxattn", "the authors of maxattn", "the authors of maxattn"
version = release = maxattn.__version__
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "myst_nb",
    "docs.building.extension",
]
exclude_patterns = ["_build", "measured", "building", "pictures"]
nitpicky = True
default_role = "py:obj"

# ---- Markdown and notebooks ----------------------------------------------------------------------

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120

# ---- the API -------------------------------------------------------------------------------------

add_module_names = False
toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 72
napoleon_numpy_docstring = False
napoleon_use_rtype = False

# ---- how it looks --------------------------------------------------------------------------------

html_theme = "sphinx_book_theme"
html_title = "maxattn"
html_show_copyright = False
html_static_path = ["building/static"]
html_css_files = ["maxattn.css"]
html_theme_options = {
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "use_download_button": True,
    "use_fullscreen_button": False,
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
