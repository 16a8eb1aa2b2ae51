"""The job file: YAML to frozen models, with every problem named at once."""

__all__ = [
    "build_options",
    "dump",
    "globs",
    "importable",
    "job",
    "json_schema",
    "limits",
    "load",
    "problems",
    "sections",
    "yamlfile",
]
