"""What a `_target_` names: its class, its arguments, and the nodes of the evaluation data. Imports no torch."""
