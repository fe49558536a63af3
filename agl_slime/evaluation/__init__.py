"""Is a model better? Samples of the same tasks, what they add up to, and how sure that is."""
