"""`ddp-train doctor`: are these machines fit for this run? Ranks run it (`RankProgram`), however they were started."""
