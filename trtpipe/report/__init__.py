"""What a person reads after a build: `report.html`, one file without a network, and the page of a night's builds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trtpipe.nightly_report import NightlyReport
    from trtpipe.report.content import ReportContent
    from trtpipe.report.nightly import History

__all__ = ["render", "render_nightly"]


def render(content: ReportContent) -> str:
    """`content` as one HTML page; the same content gives the same text. See `trtpipe.report.page.render`."""
    from trtpipe.report import page

    return page.render(content)


def render_nightly(
    report: NightlyReport, history: History | None = None, links: Mapping[str, str] | None = None
) -> str:
    """A night's builds as one HTML page; the same night gives the same text. See `trtpipe.report.nightly.render`."""
    from trtpipe.report import nightly

    return nightly.render(report, history, links)
