"""Distillation for fastloop: the plugin ``distill``."""
