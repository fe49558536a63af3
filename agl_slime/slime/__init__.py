"""What this package needs inside slime: settings from slime's ``args``, the connection to a store, tasks on demand, and
the version differences."""
