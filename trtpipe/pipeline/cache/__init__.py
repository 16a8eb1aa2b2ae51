"""What a job is made of, and the results of its stages by that, kept from build to build."""
