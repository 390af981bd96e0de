"""Streamed training splits of text tasks."""
