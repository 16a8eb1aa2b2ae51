"""One module a command: parse, call a function of the package, print what it returned."""
