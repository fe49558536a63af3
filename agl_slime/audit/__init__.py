"""An independent reader of a run's files: proves from them alone that each task has one end, that each sampled token
was trained at most once, by weights that the run has pushed, and that all files say the same. It imports nothing of
the code that wrote them."""

from agl_slime.audit.agree import Audit as Audit
from agl_slime.audit.agree import audit as audit
