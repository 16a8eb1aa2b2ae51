"""Q/DQ and casts on the captured graph, sensitivities, and the search for what to keep out of INT8."""

__all__ = [
    "calibrate",
    "corrections",
    "diagnose",
    "formats",
    "given",
    "moments",
    "narrow",
    "operators",
    "partial",
    "payoff",
    "placements",
    "policy",
    "precision",
    "quantize",
    "ranking",
    "search",
    "sensitivity",
    "trials",
]
