"""Loading, ordering and packing samples."""
