"""Pages for people: the report of a build, of a bench, of a tuning."""

__all__ = ["bench_page", "charts", "content", "figures", "metric_rows", "page", "thresholds", "tune_page"]
