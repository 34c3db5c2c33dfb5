"""What runs on each machine of a run over several, `program` first, and how they join and agree. Imports no torch."""
