"""How Sphinx builds these pages: ``make docs``, or ``sphinx-build docs build/docs``."""

from importlib.metadata import version as installed_version

project = "exatwin"
author = "The exatwin developers"
copyright = author  # noqa: A001 (Sphinx reads this name)
release = installed_version("exatwin")
version = release

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = "index"
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"exatwin {release}"
