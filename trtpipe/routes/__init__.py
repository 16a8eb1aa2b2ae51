"""The ways from a quantized graph to an engine, by the names a job uses; nothing is loaded until one is taken."""
