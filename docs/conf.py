"""How Sphinx builds the pages: `.ci/docs` does, with warnings as errors. It needs the network for nothing."""

from __future__ import annotations

import pypipe

project = "pypipe"
author = "the pypipe authors"
version = release = pypipe.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3  # links such as data-parallel.md#tensor-parallelism

html_theme = "furo"
html_title = f"pypipe {release}"
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False

autodoc_member_order = "bysource"
autodoc_typehints = "description"  # beside the text of each argument; the signatures stay readable
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
default_role = "py:obj"  # `name` in a docstring links to the name where the reference has it
python_maximum_signature_line_length = 100
