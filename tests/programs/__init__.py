"""Modules that run as processes of their own, and agents that those import by name or by path."""
