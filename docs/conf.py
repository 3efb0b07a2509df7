"""Sphinx configuration of `make docs`. The source directory is the root, so links to README are checked."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

project = "megatron-mux"
extensions = ["myst_parser", "sphinxarg.ext"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md", "benchmarks/**.md", "examples/launch/*.md"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = project
suppress_warnings = ["toc.not_included"]  # result tables are reached from the pages that cite them
