"""Spans and tokens: how model calls are written to spans, and how the spans of a rollout become slime Samples."""
