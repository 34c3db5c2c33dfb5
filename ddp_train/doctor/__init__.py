"""`ddp-train doctor`: are these machines fit for this run? Ranks run it (`Program`), however they were started."""
