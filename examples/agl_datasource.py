from agl_slime import AGLDataSource as AGLDataSource
