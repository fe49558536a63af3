"""Programs beside the training loop, a folder each, that read what it wrote or play it. Only the command line imports
one, by its name in ``agl_slime.cli.main.COMMANDS`` and when the command is asked for."""
