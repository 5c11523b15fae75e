"""The documentation site: ``make docs`` builds it, offline, and warnings are errors."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_site")]
os.environ["HF_HUB_OFFLINE"] = "1"

from bridge.version import __version__  # noqa: E402  (found by the line above)

project = "transformer-bridge"
copyright = "the transformer-bridge authors"  # Sphinx's name for it
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx_copybutton",
    "api_pages",
    "lookup_data",
    "names_in_search",
    "notebook_pages",
    "pictures_in_pages",
    "repository_pages",
]
# What a reader copies from an example of a docstring is its code, without prompts and results.
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
exclude_patterns = ["_site", "_static"]
source_suffix = {".md": "markdown"}

# Every heading can be linked to, as on GitHub.
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"transformer-bridge {__version__}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["search_tables.js"]
html_extra_path = ["../bridge/llms.txt"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#08519c", "color-brand-content": "#08519c"},
    "dark_css_variables": {"color-brand-primary": "#8cc8ff", "color-brand-content": "#8cc8ff"},
}
