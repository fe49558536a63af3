"""``agl-slime rehearse``: a launch script of slime's style, played on one machine without a GPU."""
