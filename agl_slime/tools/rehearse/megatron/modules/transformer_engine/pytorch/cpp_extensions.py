cast_to_fp8 = None
