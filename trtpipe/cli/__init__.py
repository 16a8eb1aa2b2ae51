"""The command line; the only room that prints for the user."""

__all__ = ["main"]
