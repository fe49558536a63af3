"""``agl-slime record``: exact tokens of any agent's model calls, for any trainer."""
