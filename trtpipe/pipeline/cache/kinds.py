"""Kinds of entries in the cache, beside those of the stages."""

#: What is known of a bundle that was built, its files, and what a job's code read.
BUILT, BUNDLE, READS = "built", "bundle", "reads"
