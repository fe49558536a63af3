from agl_slime import SGLangLitAgent as SGLangLitAgent
