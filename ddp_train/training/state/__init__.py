"""What of a run is saved, and how it comes back: checkpoints while it trains, continuing, initial weights, the identity of the data."""
