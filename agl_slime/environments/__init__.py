"""Environments of verifiers, trained through the gateway: tasksets that it lacks, and a sandbox without containers."""
