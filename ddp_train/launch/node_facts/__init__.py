"""What a machine tells of itself before torch starts, and what of it differs from the first machine. Imports no torch."""
