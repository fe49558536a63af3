from agl_slime.support.moved import names_from

__getattr__ = names_from(__name__, "agl_slime.slime.source", "agl_slime.datasource.source")
