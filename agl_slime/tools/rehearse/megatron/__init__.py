"""slime's Megatron actors on a CPU: Megatron-LM and slime are unmodified; CUDA and Transformer Engine are replaced.

python -m agl_slime.tools.rehearse.megatron [SCRIPT] [FLAGS]
"""
