"""The format on disk: bundles and kits, their manifest, signatures and archives."""

__all__ = ["archive", "format", "golden", "hybrid", "kit", "manifest", "signing", "triton"]
