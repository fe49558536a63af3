"""Property tests say nothing about speed: a machine that is busy with other things must not fail them."""

from hypothesis import settings

settings.register_profile("agl-slime", deadline=None)
settings.load_profile("agl-slime")
