"""Pages for people: the report of a build, of a bench, of a tune."""
