"""Other ranks: the process group, the store in which they meet, and one attempt of a run."""
