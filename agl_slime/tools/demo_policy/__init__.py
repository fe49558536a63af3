"""``agl-slime demo-policy``: makes a tiny policy that knows the format of an agent's answers."""
