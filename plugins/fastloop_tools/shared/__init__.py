"""Helpers of several commands: changed recipes, recipes as text, JSON files, tables, pictures, and samples as text."""
