"""One self-contained HTML page: a table, figures, the environment, and how to repeat it. Loads no torch."""

from __future__ import annotations

from creditscope.report.audit import AuditPage, CreditPart
from creditscope.report.page import Illustration, Judged, Page
from creditscope.report.tables import Table, accuracies

__all__ = ["AuditPage", "CreditPart", "Illustration", "Judged", "Page", "Table", "accuracies"]
