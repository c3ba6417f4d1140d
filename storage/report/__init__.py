"""The report of a run: built from the lineage alone, shown as JSON, in a terminal, or as one self-contained page.

Called by `ratchet report`. A report of a running run says where it stands.
"""

from storage.report.build import build_report
from storage.report.model import Report
from storage.report.page import render_html
from storage.report.terminal import render_terminal

__all__ = ["Report", "build_report", "render_html", "render_terminal"]
