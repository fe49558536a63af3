from agl_slime.support.moved import names_from

__getattr__ = names_from(__name__, "agl_slime.store.bridge", "agl_slime.store.retention")
