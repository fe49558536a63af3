"""Stands where an importable SGLang would: the few names that slime imports. Engines are real, in processes of their
own, and spoken to by HTTP."""
