from types import SimpleNamespace

recipe = SimpleNamespace(DelayedScaling=type("DelayedScaling", (), {}))
