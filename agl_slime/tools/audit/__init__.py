"""An independent audit of a run's files: each task has one end, each sampled token was trained at most once and sampled
by weights that the run pushed, and all files agree. It imports no code that writes them."""

from agl_slime.tools.audit.agree import Audit as Audit
from agl_slime.tools.audit.agree import audit as audit
