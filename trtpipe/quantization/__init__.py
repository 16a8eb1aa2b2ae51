"""Q/DQ and casts on the captured graph, sensitivities, and the search for what to keep wide."""

__all__ = [
    "diagnose",
    "operators",
    "partial",
    "payoff",
    "placement",
    "precision",
    "quantize",
    "ranking",
    "search",
    "trials",
    "units",
]
