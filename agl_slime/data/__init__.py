"""Completed rollouts as groups of Samples: reading, assembling, the ledger of outcomes, delivery."""
