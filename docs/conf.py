"""Settings of Sphinx; ``make docs`` builds the pages without a network.

The source is the whole repository, so that links between pages and files are the same here and where files are shown.
"""

import sys
from pathlib import Path

from comet.version import comet_version

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "Comet"
author = "The Comet authors"
copyright = author
release = comet_version()
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "from_code"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "benchmarks/results/*.md"]
exclude_patterns = [".*", "build", "outputs", "comet", "kernels", "launch", "tests", "*.egg-info"]
html_theme = "furo"
html_title = "Comet"
html_show_sourcelink = False
html_extra_path = ["_ext/root"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_use_rtype = False
