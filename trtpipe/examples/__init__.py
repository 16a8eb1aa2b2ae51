"""Models and data of the example jobs."""
