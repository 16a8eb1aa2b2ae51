"""What a person reads after a build: `report.html`, one file without a network, and the page of a night's builds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trtpipe.report.content import ReportContent
    from trtpipe.report.nightly import Night

__all__ = ["render", "render_nightly"]


def render(content: ReportContent) -> str:
    """`content` as one HTML page; the same content gives the same text. See `trtpipe.report.page`."""
    from trtpipe.report import page

    return page.render(content)


def render_nightly(night: Night) -> str:
    """A night's builds as one HTML page; the same night gives the same text. See `trtpipe.report.nightly`."""
    from trtpipe.report import nightly

    return nightly.render(night)
