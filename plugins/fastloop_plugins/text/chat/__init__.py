"""Conversations: their rows, template, tokens and loss mask."""
