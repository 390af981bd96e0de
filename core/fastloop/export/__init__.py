"""The export of a trained model for use outside fastloop, and its model card."""
