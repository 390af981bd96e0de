"""The clock, the regions of the loop and the hardware of a run."""
