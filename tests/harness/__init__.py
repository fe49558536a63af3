"""What tests of several rooms share, a module per subject."""
