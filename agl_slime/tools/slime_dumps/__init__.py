"""The dumps of slime's own runs, as a run of ours: metrics, groups and rollouts."""
