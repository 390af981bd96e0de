"""The export of a trained model for use outside fastloop, and its model card: the hook ``export_model``.

The command ``fastloop export`` converts an exported model afterwards: ``fastloop_tools.export``.
"""
