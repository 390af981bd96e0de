"""Helpers of several commands. They import no command, and ``trials`` imports only them."""
