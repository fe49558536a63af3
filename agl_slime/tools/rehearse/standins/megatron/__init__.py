"""Stands where Megatron would: only its options, so that slime's own command line can be parsed on a machine without
it."""
