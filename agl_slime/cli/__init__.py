"""The command line: settings of a run, the wiring of its parts, and each command."""
