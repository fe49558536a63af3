"""Training in verifiers' environments through the gateway; more tasksets, and a sandbox without containers."""
