"""The pages of runs: one file that needs no network (``report``), or a server of it (``view``)."""
