"""The code that runs inside slime: settings from ``args``, the connection to a store, hooks, the data source, and
version differences."""
