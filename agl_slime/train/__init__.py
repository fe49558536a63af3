"""Training: the local trainer, and the parts that slime loads."""
