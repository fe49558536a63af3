"""``agl-slime compare``: the first place in which two runs that should be equal are not."""
