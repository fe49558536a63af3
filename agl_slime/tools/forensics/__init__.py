"""Why sampler and trainer differ, a step computed again, and when behaviours began: read from the files of a run, or
from slime's dumps."""
