"""fastloop's own plugins: one a file, registered by the same entry points that a third party uses."""
