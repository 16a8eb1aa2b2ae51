"""Many jobs in a night: workers, history, regressions, the night's page."""

__all__ = ["fleet_worker", "history", "history_plot", "options", "outcome", "page", "regressions", "run", "transport"]
