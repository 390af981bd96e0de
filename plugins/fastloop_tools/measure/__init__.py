"""Measure runs in processes of their own."""
