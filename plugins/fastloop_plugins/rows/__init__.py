"""Rows of data from files: found, opened, checked and read, one module for each format."""
