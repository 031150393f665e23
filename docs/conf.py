"""Sphinx: Markdown pages, furo, and a reference written from the code. Builds without a network."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

import creditscope

project = "creditscope"
author = "the creditscope developers"
project_copyright = "the creditscope developers"
version = release = creditscope.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "reference"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100

html_theme = "furo"
html_title = f"creditscope {release}"
html_show_sphinx = False
